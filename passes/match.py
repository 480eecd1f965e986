"""What rules ask about operands: shapes, literals, constants, which elements of another value a value is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ir.build import infer
from ir.dims import Dim, free_names, product
from ir.graph import Arg, Op, Scalar, Value, Weight
from ir.ops import OPS, InferError
from ir.ops.pointwise import ACTIVATIONS
from ir.rewrite import View
from ir.types import DType, Tensor

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "and", "or"})
POINTWISE = tuple(op.kind for op in OPS.values() if op.pointwise)
BROADCASTING = tuple(kind for kind in POINTWISE if OPS[kind].num_required > 1)
ACTIVATION_KINDS = tuple(kind for kind in ACTIVATIONS if kind != "none")  # what a linear can end with
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


def operand_named(op: Op, name: str) -> Arg:
    """The operand that the op's declaration calls `name`, None where it is absent."""
    return operand(op, [n.rstrip("?*") for n in OPS[op.kind].operands].index(name))


def attribute(op: Op, name: str) -> Any:
    """An attribute, or its default."""
    return OPS[op.kind].complete(op.attrs)[name]


def keeps_type(op: Op, args: Sequence[Arg]) -> bool:
    """Whether an op of one result gives the same type on other operands."""
    try:
        return infer(op.kind, args, op.attrs) == (op.out.type,)
    except InferError:
        return False


def orders(op: Op) -> Iterator[tuple[Arg, Arg]]:
    """The operands of a commutative op, both ways round."""
    a, b = op.args
    yield a, b
    yield b, a


def last_axis(arg: Arg) -> int:
    return len(shape(arg)) - 1


def is_constant(view: View, arg: Arg, depth: int = CONSTANT_DEPTH) -> bool:
    """Whether an operand is a weight or computed from weights and literals alone."""
    if isinstance(arg, Weight):
        return True
    op = view.producer(arg)
    if op is None or depth == 0 or any(not isinstance(d, int) for d in shape(arg)):
        return False
    if any(free_names(a) for a in op.attrs.values()):
        return False
    return all(isinstance(a, Scalar | None) or is_constant(view, a, depth - 1) for a in op.args)


def without_leading_ones(sizes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    first = next((i for i, d in enumerate(sizes) if d != 1), len(sizes))
    return sizes[first:]


@dataclass(frozen=True)
class Lanes:
    """Elements start, start+step, ... of the last axis of a value: `count` of them.

    flat: the value's last two axes count as one.
    """

    base: Value
    start: int
    step: int
    count: int
    flat: bool = False

    @property
    def stop(self) -> int:
        """One past the last element, where step is 1."""
        return self.start + self.count

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.step == 1 and self.count == self.width

    @property
    def width(self) -> Dim:
        """Elements that there are to choose from."""
        return product(shape(self.base)[-2 if self.flat else -1 :])


def lanes(view: View, arg: Arg) -> Lanes | None:
    """Which elements of which value's last axis an operand is, seen through slices, splits and pairings.

    An operand [..,P,1] that was cut from pairs [..,P,2] is P elements too.
    """
    if not isinstance(arg, Value) or not shape(arg):
        return None
    count = shape(arg)[-1]
    if not isinstance(count, int):
        return None
    op = view.made_by(arg, "slice", "split", "reshape")
    found = _selected(view, op, arg) if op is not None else None
    return found or Lanes(arg, 0, 1, count)


def _selected(view: View, op: Op, arg: Value) -> Lanes | None:
    if op.kind == "reshape":
        return _of_pairs(view, op.args[0]) if shape(op.args[0]) == (*shape(arg), 1) else None
    paired = _of_pairs(view, arg)
    if paired is not None:
        return paired
    picked, inner = _picked(op, arg), lanes(view, op.args[0])
    if picked is None or inner is None:
        return None
    start, step, count = picked
    return Lanes(inner.base, inner.start + start * inner.step, step * inner.step, count, inner.flat)


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


def _of_pairs(view: View, part: Arg) -> Lanes | None:
    """Element i of each pair of x reshaped to [..,P,2], as [..,P,1]: elements i, i+2, ... of x."""
    cut = view.made_by(part, "slice", "split")
    paired = view.made_by(cut.args[0], "reshape") if cut is not None else None
    if cut is None or paired is None or not isinstance(part, Value) or shape(part)[-1] != 1:
        return None
    *outer, pairs, width = (1, *shape(paired.out))
    picked, inner = _picked(cut, part), lanes(view, paired.args[0])
    if picked is None or not isinstance(pairs, int) or not isinstance(width, int) or width == 1:
        return None
    if inner is None or shape(paired.args[0])[:-1] != tuple(outer[1:]):
        return Lanes(paired.out, picked[0], width, pairs, flat=True)
    return Lanes(inner.base, inner.start + picked[0] * inner.step, width * inner.step, pairs, inner.flat)
