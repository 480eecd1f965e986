"""Values whose token axis is longer or shorter than the sequence, read for each of its tokens.

Padding before the tokens, cutting some off and joining pieces moves tokens to other places: `at` says what
stands a number of places on from each token, made of the tokens at and before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ir.dims import free_names, normalize, product, symbol
from ir.graph import Arg, Op, Scalar, Value
from ir.ops import OPS
from ir.rewrite import View
from passes.match import attribute, shape

S = symbol("S")
MAX_ROWS = 8  # of fixed rows that are chosen by position, one `where` for each

Back = Callable[[Value, int, int, View], "Value | None"]


@dataclass(frozen=True)
class Lagged:
    """back(x, axis, n, view): x of the token n places back, zeros where no token is; or None.

    An axis is that of the tokens. Results have size S there, or 1 where all tokens have the same.
    """

    view: View
    back: Back
    _places: dict[str, int] = field(default_factory=dict[str, int])  # n of what `back` gave

    def at(self, arg: Arg, axis: int, offset: Any, first: int = 0) -> Arg | None:
        """Element p + offset along the axis for each token p from `first` on; others are anything.

        None where that looks ahead, or cannot be told.
        """
        if not isinstance(arg, Value) or not free_names(shape(arg)[axis]):
            return self._fixed(arg, axis, offset, first)
        op = self.view.producer(arg)
        joined = op is not None and op.kind == "concat" and op.attr("axis") == axis
        if shape(arg)[axis] == S and not joined:
            return self._of_tokens(arg, axis, offset)
        found = None if op is None else self.made(op, arg, axis, offset, first)
        return self._of_tokens(arg, axis, offset) if found is None and shape(arg)[axis] == S else found

    def made(self, op: Op, out: Value, axis: int, offset: Any = 0, first: int = 0) -> Arg | None:
        """The same of what an op makes, read from its operands."""
        rank = len(shape(out))
        if op.kind == "slice" and op.attr("axis") == axis:
            whole = attribute(op, "step") == 1
            return self.at(op.args[0], axis, normalize(offset + op.attr("start")), first) if whole else None
        if op.kind == "concat" and op.attr("axis") == axis:
            return self._joined(op, axis, offset, first)
        if op.kind == "transpose":
            return self._again(op, op.attr("perm")[axis], offset, first)
        if op.kind == "reshape":
            return self._reshaped(op, axis, offset, first)
        if op.kind == "split" and op.attr("axis") != axis:
            x = self.at(op.args[0], axis, offset, first)
            return None if x is None else self.view.ops("split", x, **op.attrs)[op.outs.index(out)]
        if op.kind in ("concat", "expand") or OPS[op.kind].pointwise:
            return self._broadcast(op, axis, offset, first)
        along: dict[str, Any] = {"slice": rank, "linear": rank - 1, "softmax": op.attrs.get("axis")}
        if op.kind in ("rms_norm", "layer_norm"):
            along[op.kind] = rank - attribute(op, "rank")
        if op.kind in ("sum", "mean", "max"):
            along[op.kind] = min(op.attr("axes"))
        return self._again(op, axis, offset, first) if axis < along.get(op.kind, 0) else None

    def _of_tokens(self, x: Value, axis: int, offset: Any) -> Value | None:
        if offset == 0 or not isinstance(offset, int) or offset > 0:
            return x if offset == 0 else None
        found = self.back(x, axis, -offset, self.view)
        if found is not None:
            self._places[found.name] = -offset
        return found

    def _fixed(self, arg: Arg, axis: int, offset: Any, first: int) -> Arg | None:
        """Rows of a fixed number: not of tokens, or cut from theirs."""
        count, op = shape(arg)[axis], self.view.producer(arg)
        if op is not None and op.kind == "slice" and op.attr("axis") == axis:
            found = self.made(op, op.out, axis, offset, first)
            if found is not None or free_names(shape(op.args[0])[axis]):
                return found
        if count == 1:
            return arg
        if op is not None and op.kind == "full":
            sizes = (*shape(arg)[:axis], 1, *shape(arg)[axis + 1 :])
            return self.view.op("full", shape=sizes, value=op.attr("value"), dtype=op.attr("dtype", "f32"))
        if not isinstance(offset, int) or not isinstance(count, int) or not 1 < count <= MAX_ROWS:
            return None
        rows = [self.view.op("slice", arg, axis=axis, start=i, stop=i + 1) for i in range(count)]
        found = rows[-1]
        for i in reversed(range(count - 1)):
            found = self._before(len(shape(arg)) - axis, i + 1 - offset, rows[i], found)
        return found

    def _before(self, from_right: int, end: int, x: Arg, y: Arg) -> Arg:
        """x for tokens before `end`, else y; from_right: of the tokens' axis, 1 being the last."""
        if end <= 0:
            return y
        position = self.view.op("reshape", self.view.op("iota", size=S), shape=(S, *(1,) * (from_right - 1)))
        return self.view.op("where", self.view.op("lt", position, Scalar(end)), x, y)

    def _joined(self, op: Op, axis: int, offset: Any, first: int) -> Arg | None:
        """The part that each token falls in, chosen by its position."""
        parts: list[tuple[Any, Arg]] = []  # (the tokens before which it ends, elements)
        low: Any = 0
        for arg in op.args:
            begin, end = normalize(low - offset), normalize(low + shape(arg)[axis] - offset)
            low, here = normalize(low + shape(arg)[axis]), normalize(offset - low)
            if isinstance(end, int) and end <= first:
                continue
            past = 0 if isinstance(end, int) else normalize(end - S)
            found = self.at(arg, axis, here, max(first, begin)) if isinstance(begin, int) else None
            if found is None or not isinstance(past, int) or past < 0:
                return None
            parts.append((end, found))
            if not isinstance(end, int):
                break
        if not parts or isinstance(parts[-1][0], int):
            return None
        total = parts[-1][1]
        for end, found in reversed(parts[:-1]):
            zeros = self.view.made_by(found, "full")
            is_zero = zeros is not None and zeros.attr("value") == 0
            if not (is_zero and isinstance(total, Value) and self._places.get(total.name) == end):
                total = self._before(len(shape(op.out)) - axis, end, found, total)
        return total

    def _again(self, op: Op, axis: int, offset: Any, first: int) -> Arg | None:
        """The op on the same of its first operand."""
        x = self.at(op.args[0], axis, offset, first)
        return None if x is None else self.view.op(op.kind, x, *op.args[1:], **op.attrs)

    def _reshaped(self, op: Op, axis: int, offset: Any, first: int) -> Arg | None:
        before, after = shape(op.args[0]), shape(op.out)
        for place, size in enumerate(before):
            if size == after[axis] and product(before[:place]) == product(after[:axis]):
                x = self.at(op.args[0], place, offset, first)
                sizes = None if x is None else (*after[:axis], shape(x)[place], *after[axis + 1 :])
                return None if sizes is None else self.view.op("reshape", x, shape=sizes)
        return None

    def _broadcast(self, op: Op, axis: int, offset: Any, first: int) -> Arg | None:
        """Pointwise ops, expand, and concat along another axis."""
        rank, args = len(shape(op.out)), list[Arg]()
        for arg in op.args:
            own = axis - (rank - len(shape(arg)))
            if not isinstance(arg, Scalar | None) and own >= 0 and shape(arg)[own] != 1:
                found = self.at(arg, own, offset, first)
                if found is None:
                    return None
                args.append(found)
            else:
                args.append(arg)
        if op.kind == "concat":
            args = [self._wide(arg, axis) for arg in args]
        if op.kind != "expand":
            return self.view.op(op.kind, *args, **op.attrs)
        sizes = shape(op.out)
        return self.view.op("expand", args[0], shape=(*sizes[:axis], S, *sizes[axis + 1 :]))

    def _wide(self, arg: Arg, axis: int) -> Arg:
        sizes = shape(arg)
        if sizes[axis] == S:
            return arg
        return self.view.op("expand", arg, shape=(*sizes[:axis], S, *sizes[axis + 1 :]))
