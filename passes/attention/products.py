"""Products around attention in the forms that the rules for attention know.

With factors that do not depend on the key, (softmax(a) - f * softmax(b)) v is two attentions, and
(q k^T) * f is (q * f) k^T; a sum of two products is one of longer queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ir.build import infer
from ir.dims import free_names
from ir.graph import Arg, Op, Scalar, Value
from ir.ops import InferError
from ir.rewrite import Rule, View
from passes.attention.indexing import shape_of
from passes.match import is_float, literal, orders

MAX_TERMS = 8  # of a sum of attentions


@dataclass(frozen=True)
class _Term:
    """Probabilities, what they are multiplied by and divided by in turn, and whether they are taken away."""

    of: Arg
    factors: tuple[tuple[str, Arg], ...] = ()
    negative: bool = False


def distributed(behind: Callable[[Arg, View], Op | None], op: Op, view: View) -> Arg | None:
    """(f * p + g * r) @ v -> f * (p @ v) + g * (r @ v), where f and g do not depend on the key.

    behind: the softmax that probabilities are made from, None where there is none.
    """
    p, v = op.args
    terms = _terms(p, behind, view)
    if terms is None or len(terms) > MAX_TERMS or terms == [_Term(p)]:
        return None
    total: Value | None = None
    for term in sorted(terms, key=lambda t: t.negative):
        part = view.op("matmul", term.of, v)
        for kind, factor in term.factors:
            part = view.op(kind, part, factor)
        if total is None:
            total = view.op("neg", part) if term.negative else part
        else:
            total = view.op("sub" if term.negative else "add", total, part)
    return total if total is not None and total.type == op.out.type else None


def _terms(arg: Arg, behind: Callable[[Arg, View], Op | None], view: View) -> list[_Term] | None:
    """What adds up to probabilities; None where something else is in the sum."""
    op = view.made_by(arg, "add", "sub", "neg", "mul", "div", "reshape", "cast")
    if op is None or (op.kind == "reshape" and shape_of(op.out)[-1] != shape_of(op.args[0])[-1]):
        return [_Term(arg)] if behind(arg, view) is not None else None
    if op.kind in ("mul", "div"):
        return _multiplied(op, behind, view)
    found: list[_Term] = []
    for place, operand in enumerate(op.args):
        terms = _terms(operand, behind, view)
        if terms is None:
            return None
        minus = op.kind == "neg" or (op.kind == "sub" and place == 1)
        found += [replace(t, negative=t.negative != minus) for t in terms]
    if op.kind in ("reshape", "cast"):
        return [_Term(arg)] if found == [_Term(op.args[0])] else [_moved(op, t, view) for t in found]
    return found


def _multiplied(op: Op, behind: Callable[[Arg, View], Op | None], view: View) -> list[_Term] | None:
    for x, factor in orders(op) if op.kind == "mul" else (op.args,):
        terms = _terms(x, behind, view) if _is_row_factor(factor) else None
        if terms is not None:
            return [replace(t, factors=(*t.factors, (op.kind, factor))) for t in terms]
    return None


def _is_row_factor(arg: Arg) -> bool:
    """Whether a factor of [.., queries, keys] is the same for all keys."""
    return isinstance(arg, Scalar) or (is_float(arg) and shape_of(arg)[-1:] in ((), (1,)))


def _moved(op: Op, term: _Term, view: View) -> _Term:
    """A term of what is reshaped, which leaves the keys' axis, or cast."""
    if op.kind == "cast":
        factors = tuple((kind, f if isinstance(f, Scalar) else view.op("cast", f, **op.attrs))
                        for kind, f in term.factors)  # fmt: skip
        return replace(term, of=view.op("cast", term.of, **op.attrs), factors=factors)
    before, after = shape_of(op.args[0]), shape_of(op.out)
    factors = tuple((kind, _reshaped_factor(f, before, after, view)) for kind, f in term.factors)
    of = term.of if shape_of(term.of) == before else view.op("expand", term.of, shape=before)
    return replace(term, of=view.op("reshape", of, shape=after), factors=factors)


def _reshaped_factor(factor: Arg, before: tuple[Any, ...], after: tuple[Any, ...], view: View) -> Arg:
    if isinstance(factor, Scalar) or not shape_of(factor):
        return factor
    rows = view.op("expand", factor, shape=(*before[:-1], 1))
    return view.op("reshape", rows, shape=(*after[:-1], 1))


@dataclass(frozen=True)
class _Product:
    """number * x y, of queries x [..,S,D] and keys y [..,D,S]."""

    op: Op
    number: float = 1.0

    @property
    def operands(self) -> tuple[Arg, Arg]:
        return self.op.args[0], self.op.args[1]

    @staticmethod
    def of(arg: Arg, view: View) -> _Product | None:
        number, op = 1.0, view.made_by(arg, "matmul", "mul", "div")
        while op is not None and op.kind != "matmul":
            value = literal(op.args[1])
            if value is None or value == 0:
                return None
            number = number * value if op.kind == "mul" else number / value
            op = view.made_by(op.args[0], "matmul", "mul", "div")
        if op is None or not isinstance(shape_of(op.args[0])[-1], int):
            return None
        both = all(free_names(size) for size in shape_of(op.out)[-2:])
        return _Product(op, number) if both else None

    def scaled(self, made: Value, view: View) -> Value:
        return made if self.number == 1 else view.op("mul", made, Scalar(self.number))


def factor_into_product(op: Op, view: View) -> Arg | None:
    """(x y) * f and (x y) / f, f the same for all keys or for all queries -> of one operand."""
    for scores, factor in orders(op) if op.kind == "mul" else (op.args,):
        dot = _Product.of(scores, view)
        if dot is None or isinstance(factor, Scalar) or not is_float(factor):
            continue
        x, y = dot.operands
        sizes = shape_of(factor)
        if _is_row_factor(factor):
            x = _computed(op.kind, x, factor, view)
        elif len(sizes) == 1 or sizes[-2] == 1:
            y = _computed(op.kind, y, factor, view)
        else:
            continue
        out = _computed("matmul", x, y, view)
        if out is not None and (found := dot.scaled(out, view)).type == op.out.type:
            return found
    return None


def _computed(kind: str, x: Arg, y: Arg, view: View) -> Value | None:
    """None where the shapes do not fit."""
    try:
        infer(kind, (x, y), {})
    except InferError:
        return None
    return view.op(kind, x, y)


def sum_of_products(op: Op, view: View) -> Arg | None:
    """a x y + b z w -> a [x, b/a z] [y; w]."""
    first, second = (_Product.of(arg, view) for arg in op.args)
    if first is None or second is None:
        return None
    (x, y), (z, w) = first.operands, second.operands
    ratio = (second.number if op.kind == "add" else -second.number) / first.number
    z = z if ratio == 1 else view.op("mul", z, Scalar(ratio))
    left = _joined(x, z, view)
    right = _joined(_turned(y, view), _turned(w, view), view)
    if left is None or right is None:
        return None
    found = first.scaled(view.op("matmul", left, _turned(right, view)), view)
    return found if found.type == op.out.type else None


def _turned(arg: Arg, view: View) -> Value:
    """The last two axes exchanged."""
    rank = len(shape_of(arg))
    perm = (*range(rank - 2), rank - 1, rank - 2)
    made = view.made_by(arg, "transpose")
    if made is not None and tuple(made.attr("perm")) == perm and isinstance(made.args[0], Value):
        return made.args[0]
    return view.op("transpose", arg, perm=perm)


def _joined(x: Arg, y: Arg, view: View) -> Value | None:
    """[..,S,D] and [..,S,E] as [..,S,D+E], the axes before them broadcast."""
    a, b = shape_of(x), shape_of(y)
    rank = max(len(a), len(b))
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    lead = tuple(n if m == 1 else m for m, n in zip(a[:-1], b[:-1], strict=True))
    if any(size[i] not in (1, lead[i]) for size in (a, b) for i in range(rank - 1)):
        return None
    parts = [p if shape_of(p) == (*lead, size[-1]) else view.op("expand", p, shape=(*lead, size[-1]))
             for p, size in ((x, a), (y, b))]  # fmt: skip
    return view.op("concat", *parts, axis=rank - 1)


RULES = (
    Rule("factor of scores", ("mul", "div"), factor_into_product),
    Rule("sum of products", ("add", "sub"), sum_of_products),
)
