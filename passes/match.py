"""What rules ask about operands: shapes, literals, constants, which elements of another value a value is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ir.dims import Dim
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.ops import OPS
from ir.rewrite import View
from ir.types import DType, Tensor

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or"})
CONSTANT_DEPTH = 12  # how many weight ops deep a constant is looked for


def tensor(arg: Arg) -> Tensor | None:
    """The type of an operand that is a tensor."""
    return arg.type if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor) else None


def shape(arg: Arg) -> tuple[Dim, ...]:
    """The shape of a tensor operand; a literal has none of its own, which is ()."""
    found = tensor(arg)
    return found.shape if found is not None else ()


def dtype(arg: Arg) -> DType | None:
    found = tensor(arg)
    return found.dtype if found is not None else None


def is_float(arg: Arg) -> bool:
    found = dtype(arg)
    return found is not None and found.is_float


def literal(arg: Arg) -> float | None:
    """The number that a literal operand is."""
    return float(arg.value) if isinstance(arg, Scalar) else None


def operand(op: Op, index: int) -> Arg:
    """Operand `index`, None where it is absent."""
    return op.args[index] if index < len(op.args) else None


def attribute(op: Op, name: str) -> Any:
    """An attribute, or its default."""
    return OPS[op.kind].complete(op.attrs)[name]


def orders(op: Op) -> Iterator[tuple[Arg, Arg]]:
    """The operands of a commutative op, both ways round."""
    a, b = op.args
    yield a, b
    yield b, a


def same_kind(a: Op, kind: str) -> bool:
    return a.kind == kind


def last_axis(arg: Arg) -> int:
    return len(shape(arg)) - 1


def is_constant(view: View, arg: Arg, depth: int = CONSTANT_DEPTH) -> bool:
    """Whether an operand is a weight or computed from weights and literals alone."""
    if isinstance(arg, Weight):
        return True
    op = view.producer(arg)
    if op is None or depth == 0 or any(not isinstance(d, int) for d in shape(arg)):
        return False
    if op.kind == "dim":
        return isinstance(op.attr("size"), int)
    return all(isinstance(a, Scalar | None) or is_constant(view, a, depth - 1) for a in op.args)


def weight_values(graph: Graph) -> set[str]:
    """Names of the values that are computed from weights alone."""
    found: set[str] = set()
    for op in graph.ops:
        args = [a for a in op.args if isinstance(a, Value | Weight)]
        if args and all(isinstance(a, Weight) or a.name in found for a in args):
            found.update(out.name for out in op.outs)
    return found


def without_leading_ones(sizes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    first = next((i for i, d in enumerate(sizes) if d != 1), len(sizes))
    return sizes[first:]


@dataclass(frozen=True)
class Lanes:
    """Elements start, start+step, ... of the last axis of a value: `count` of them."""

    base: Value
    start: int
    step: int
    count: int

    @property
    def stop(self) -> int:
        """One past the last element, where step is 1."""
        return self.start + self.count

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.step == 1 and shape(self.base)[-1] == self.count


def lanes(view: View, arg: Arg) -> Lanes | None:
    """Which elements of which value's last axis an operand is, seen through slices, splits and pairings."""
    if not isinstance(arg, Value) or not shape(arg) or not isinstance(shape(arg)[-1], int):
        return None
    whole = Lanes(arg, 0, 1, int(shape(arg)[-1]))  # type: ignore[arg-type]
    op = view.made_by(arg, "slice", "split", "reshape")
    if op is None:
        return whole
    found = _selected(view, op, arg)
    return found if found is not None else whole


def _selected(view: View, op: Op, arg: Value) -> Lanes | None:
    if op.kind == "reshape":
        return _one_of_pair(view, op)
    picked = _picked(op, arg)
    inner = lanes(view, op.args[0])
    if picked is None or inner is None:
        return None
    start, step, count = picked
    return Lanes(inner.base, inner.start + start * inner.step, step * inner.step, count)


def _picked(op: Op, arg: Value) -> tuple[int, int, int] | None:
    """(start, step, count) of a slice or a split's result along its operand's last axis."""
    count = shape(arg)[-1]
    if attribute(op, "axis") != last_axis(op.args[0]) or not isinstance(count, int):
        return None
    if op.kind == "slice":
        start = attribute(op, "start")
        return (start, attribute(op, "step"), count) if isinstance(start, int) else None
    before = attribute(op, "sizes")[: op.outs.index(arg)]
    return (sum(before), 1, count) if all(isinstance(n, int) for n in before) else None


def _one_of_pair(view: View, op: Op) -> Lanes | None:
    """x reshaped to [..,P,2], element i of each pair, the pair's axis dropped: elements i, i+2, ..."""
    part = op.args[0]
    if shape(part)[-1:] != (1,) or shape(part)[:-1] != shape(op.out):
        return None
    cut = view.made_by(part, "slice", "split")
    paired = view.made_by(cut.args[0], "reshape") if cut is not None else None
    if cut is None or paired is None or not isinstance(part, Value):
        return None
    picked, inner = _picked(cut, part), lanes(view, paired.args[0])
    width, whole = shape(paired.out)[-1], shape(paired.args[0])
    kept = shape(paired.out)[:-2] == whole[:-1]
    if picked is None or inner is None or not isinstance(width, int) or not kept:
        return None
    return Lanes(inner.base, inner.start + picked[0] * inner.step, width * inner.step, int(shape(op.out)[-1]))  # type: ignore[arg-type]
