"""A graph on its way from the imported to the paged form, and what every lowering rule needs of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ir.build import GraphBuilder
from ir.dims import Dim
from ir.graph import Arg, Op, Scalar, Value, tensor_of
from passes.base import PassError
from passes.paging.groups import Groups
from passes.paging.layout import Layout, T, layout_of

HINT = (
    "Tokens of all sequences are packed into one axis: outside of attention, compute each token from itself "
    "and its position alone, and use neither the batch axis nor the length."
)


@dataclass(frozen=True)
class Placed:
    """A value of the imported form in the new graph; layout None: it does not depend on the tokens."""

    arg: Arg
    layout: Layout | None = None


@dataclass
class Lowering:
    """The graph being built, and where each imported value is in it."""

    builder: GraphBuilder
    groups: Groups
    lens: Value
    starts: Value
    placed: dict[str, Placed]

    def refuse(self, op: Op, reason: str) -> NoReturn:
        raise PassError("page_kv", op, reason, HINT)

    def layout(self, arg: Arg) -> Layout | None:
        return self.placed[arg.name].layout if isinstance(arg, Value) else None

    def layout_of_operand(self, op: Op) -> Layout:
        """The first operand's layout."""
        found = self.layout(op.args[0])
        if found is None:
            self.refuse(op, "only some of its operands depend on the tokens")
        return found

    def new(self, arg: Arg) -> Arg:
        """What stands for an imported operand in the new graph."""
        return self.placed[arg.name].arg if isinstance(arg, Value) else arg

    def result_layout(self, op: Op) -> Layout:
        shape = shape_of(op.outs[0])
        found = layout_of(shape)
        if found is None:
            self.refuse(op, f"the result {list(shape)} has no single axis of tokens")
        return found

    def emit(self, op: Op, kind: str, *args: Arg, **attrs: Any) -> Value:
        return self.emit_all(op, kind, *args, **attrs)[0]

    def emit_all(self, op: Op, kind: str, *args: Arg, **attrs: Any) -> tuple[Value, ...]:
        """Emit an op with several results."""
        self.builder.op(kind, *args, loc=op.loc, several=True, **attrs)
        return self.builder.ops[-1].outs

    def keep(self, op: Op) -> None:
        """Take over an op on weights and literals as it is."""
        self.builder.ops.append(replace(op, args=tuple(self.new(a) for a in op.args)))
        for out in op.outs:
            self.placed[out.name] = Placed(out)

    def place(self, op: Op, *values: Arg, layouts: tuple[Layout, ...] = ()) -> None:
        """Say what stands for op's results. What was emitted last takes their names if it gives them."""
        found = layouts or (self.result_layout(op),)
        shaped = [self.shaped(op, v, lay.paged) for v, lay in zip(values, found, strict=True)]
        last = self.builder.ops[-1] if self.builder.ops else None
        unnamed = last is not None and not any(o.name in self.placed for o in last.outs)
        if last is not None and unnamed and list(last.outs[: len(shaped)]) == shaped:
            given, rest = last.outs[: len(shaped)], last.outs[len(shaped) :]
            outs = tuple(Value(old.name, new.type) for old, new in zip(op.outs, given, strict=True))
            self.builder.ops[-1] = replace(last, outs=(*outs, *rest))
            shaped = list(outs)
        for old, new, lay in zip(op.outs, shaped, found, strict=True):
            self.placed[old.name] = Placed(new, lay)

    def shaped(self, op: Op, arg: Arg, shape: tuple[Dim, ...]) -> Arg:
        if arg is None or isinstance(arg, Scalar) or shape_of(arg) == shape:
            return arg
        return self.emit(op, "reshape", arg, shape=shape)

    def aligned(self, op: Op, arg: Arg, out: Layout) -> Arg:
        """An operand in a shape that broadcasts with out's paged shape."""
        if arg is None or isinstance(arg, Scalar):
            return arg
        shape, layout = shape_of(arg), self.layout(arg)
        pad = len(out.shape) - len(shape)
        if layout is not None and layout.token + pad != out.token:
            self.refuse(
                op, f"its operands have their tokens on different axes, {list(shape)} and {list(out.shape)}"
            )
        if layout is None and 0 <= out.token - pad < len(shape) and shape[out.token - pad] != 1:
            self.refuse(op, f"an operand {list(shape)} of fixed size stands along the token axis")
        sizes = [shape[i - pad] if i - pad >= 0 else 1 for i in out.kept]
        return self.shaped(op, self.new(arg), (T, *sizes) if layout is not None else _without_ones(sizes))

    def along(self, op: Op, arg: Arg, axis: int) -> tuple[Arg, int]:
        """An operand with its imported axis as one of the paged shape's, and where; refuses the tokens'.

        The batch of 1, which the paged shape leaves out, is put back where it is the one asked for.
        """
        before = self.layout(arg)
        if before is None:
            self.refuse(op, "only some of its operands depend on the tokens")
        if axis == before.token:
            self.refuse(op, f"{op.kind} runs along the tokens")
        kept = before.kept if axis in before.kept else (axis, *before.kept)
        return self.shaped(op, self.new(arg), before.only(kept)), kept.index(axis) + 1


def shape_of(arg: Arg) -> tuple[Dim, ...]:
    return tensor_of(arg).shape


def _without_ones(sizes: list[Dim]) -> tuple[Dim, ...]:
    """Without leading axes of size 1, which broadcasting adds back."""
    while sizes and sizes[0] == 1:
        sizes = sizes[1:]
    return tuple(sizes)
