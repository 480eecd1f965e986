"""Op by op, what a value is for each slot: what an expert computes from its own matrix is computed from the
matrix of the expert that the slot chose. A number times 0 is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ir.dims import Dim
from ir.graph import Arg, Op, Scalar, Value
from ir.types import DType
from passes.experts.cases import (
    Case,
    Diagonal,
    Number,
    Routed,
    Shared,
    cast_literal,
    evaluated,
    is_zero,
    literal_of,
    none_of,
)
from passes.experts.layout import (
    Atom,
    Layout,
    Unseen,
    arranged,
    feature,
    features,
    fitted,
    has,
    of_kind,
    regrouped,
    transposed,
)
from passes.experts.mixture import Args, Mixture, Rule
from passes.match import attribute, is_constant, operand, shape

_TRUE, _FALSE = Scalar(True), Scalar(False)


def _operands(ops: Sequence[Op], index: int) -> Args:
    return tuple(operand(op, index) for op in ops)


def _alike(ops: Sequence[Op]) -> Op:
    """The first of ops that differ in operands alone."""
    if any(op.attrs != ops[0].attrs for op in ops):
        raise Unseen(f"{ops[0].kind} differs between the experts")
    return ops[0]


# --- element by element


def pointwise(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    op = _alike(ops)
    cases = [m.case(_operands(ops, i), layout) for i in range(len(op.args))]
    if op.kind == "eq" and any(isinstance(c, Number) for c in cases):
        return _compared(m, cases)
    if any(isinstance(c, Diagonal) for c in cases):
        return _of_choice(op, cases)
    wanted = features(layout)
    if op.kind == "where" and isinstance(cases[0], Routed) and isinstance(cases[0].slot, Scalar):
        return _decided(m, cases[0], cases[1:], wanted)
    slots = [m.form(c, wanted) for c in cases]
    literals = [s for s in slots if isinstance(s, Scalar)]
    found = (
        evaluated(op, literals) if len(literals) == len(slots) else m.view.op(op.kind, *slots, **_attrs(op))
    )
    return Routed(found, wanted, _none(op, cases))


def _attrs(op: Op) -> dict[str, Any]:
    return {**op.attrs}


def _none(op: Op, cases: Sequence[Case]) -> Scalar | None:
    """Of experts that are not chosen."""
    nones = [none_of(c) for c in cases]
    if (op.kind == "mul" and any(map(is_zero, nones))) or (op.kind == "div" and is_zero(nones[0])):
        return Scalar(0.0)
    known = [n for n in nones if n is not None]
    return evaluated(op, known) if len(known) == len(nones) else None


def _compared(m: Mixture, cases: Sequence[Case]) -> Case:
    other = next((c for c in cases if isinstance(c, Shared)), None)
    if other is None or literal_of(other) is not None or not m.is_choice(other.arg, other.layout):
        raise Unseen("what is compared with an expert's number is not the slots of one choice")
    return Diagonal(Shared(_TRUE), _FALSE) if m.slots else Routed(_TRUE, (), _FALSE)


def _of_choice(op: Op, cases: Sequence[Case]) -> Case:
    """cast, mul and where of what is known where a slot chose the expert and where not."""
    choice = next(c for c in cases if isinstance(c, Diagonal))
    others = [c for c in cases if c is not choice]
    on = literal_of(choice.on)
    if on is None or any(not isinstance(c, Shared) for c in others):
        raise Unseen(f"{op.kind} of a choice is not followed")
    if op.kind == "cast":
        kind = DType(attribute(op, "dtype"))
        return Diagonal(Shared(cast_literal(on, kind)), cast_literal(choice.off, kind))
    if op.kind == "where" and cases[0] is choice and on == _TRUE:
        off = literal_of(others[1])
        if off is not None:
            return Diagonal(cast(Shared, others[0]), off)
    if op.kind == "mul" and on.value == 1 and choice.off.value == 0:
        return Diagonal(cast(Shared, others[0]), choice.off)
    raise Unseen(f"{op.kind} of a choice is not followed")


def _decided(m: Mixture, chosen: Routed, either: Sequence[Case], wanted: tuple[Atom, ...]) -> Case:
    """where by whether any slot chose the expert: the first of two for each slot, else the second."""
    if chosen.slot != _TRUE or chosen.none != _FALSE:
        raise Unseen("which of two is taken is not seen")
    return Routed(m.form(either[0], wanted), wanted, none_of(either[1]))


def reduced(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    """Over the slots of a choice: one of them is the expert's, or none is."""
    op = _alike(ops)
    axis, *more = attribute(op, "axes")
    if more or shape(op.args[0])[axis] != m.num_slots:
        raise Unseen(f"{op.kind} runs over something else than the slots")
    rest = layout[axis + 1 :] if attribute(op, "keepdims") else layout[axis:]
    found = m.case(_operands(ops, 0), (*layout[:axis], m.slots, *rest))
    if isinstance(found, Routed) and not m.slots:
        return found
    if not isinstance(found, Diagonal):
        raise Unseen(f"{op.kind} over the slots is not that of a choice")
    on, off = literal_of(found.on), found.off
    least = off.value == -np.inf or (on is not None and on.value >= off.value)
    if not (op.kind == "sum" and off.value == 0) and not (op.kind == "max" and least):
        raise Unseen(f"{op.kind} over the slots does not give the one that is chosen")
    wanted = features(layout)
    return Routed(m.form(found.on, wanted), wanted, off)


# --- products with the experts' matrices


def linear(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    op = _alike(ops)
    if attribute(op, "gated") or attribute(op, "activation") != "none":
        raise Unseen("a linear has an epilogue already")
    if len(ops) == 1:
        return _linear_of_all(m, op, layout)
    weights, biases = _operands(ops, 1), _operands(ops, 2)
    rows, inputs = shape(weights[0])
    x = m.case(_operands(ops, 0), (*layout[:-1], feature(inputs)))
    if any(shape(w) != (rows, inputs) or not is_constant(m.view, w) for w in weights):
        raise Unseen("the experts' matrices differ in shape")
    if any((b is None) != (biases[0] is None) for b in biases):
        raise Unseen("some experts have a bias and some have none")
    stack, bias = m.view.op("concat", *weights, axis=0), None
    if biases[0] is not None:
        each = [m.view.op("reshape", b, shape=(1, rows)) for b in biases]
        bias = m.view.op("concat", *each, axis=0)
    return _product(m, x, stack, bias, layout, inputs, op)


def _linear_of_all(m: Mixture, op: Op, layout: Layout) -> Case:
    """One linear, whose outputs are those of each expert after those of another."""
    own = layout[-1]
    if own[:1] != m.experts or len(own) > 2 or has(layout[:-1], "e"):
        raise Unseen("a linear makes what experts share")
    matrix, bias = op.args[1], operand(op, 2)
    inputs = shape(matrix)[-1]
    x = m.case(op.args[:1], (*layout[:-1], feature(inputs)))
    rows = own[1].size if len(own) == 2 else 1
    table = None if bias is None else m.view.op("reshape", bias, shape=(m.count, rows))
    return _product(m, x, matrix, table, (*layout[:-1], own[1:]), inputs, op)


def matmul(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    """x times the matrices [E,K,N] of all experts."""
    op, matrices = _alike(ops), ops[0].args[1]
    if len(ops) > 1 or not is_constant(m.view, matrices) or len(shape(matrices)) < 3:
        raise Unseen("a matmul of the experts is not one with their matrices")
    *_, inputs, rows = shape(matrices)
    inner = feature(inputs)
    own = fitted((*layout[:-2], inner, layout[-1]), shape(matrices))
    if of_kind(own, "e") != m.experts or len(features(own)) + 1 != sum(map(len, own)):
        raise Unseen("a matmul is not one matrix for each expert")
    x = m.case(op.args[:1], (*layout[:-1], inner))
    order = [*m.experts, *layout[-1], *inner]
    stack = arranged(m.view, matrices, own, order, (m.count * cast(int, rows), inputs))
    return _product(m, x, stack, None, layout, inputs, op)


def _product(
    m: Mixture, x: Case, stack: Arg, bias: Value | None, layout: Layout, inputs: Dim, op: Op
) -> Case:
    wanted = features(layout)
    if wanted != of_kind(layout[-1:], "f") or len(wanted) > 1:
        raise Unseen("an expert's linear has more axes than features")
    attrs: dict[str, Any] = {"num_experts": m.count, "dtype": op.attrs.get("dtype")}
    slot = m.view.op("moe_linear", _rows(m, x, inputs), stack, m.indices, bias, **attrs)
    if not wanted:  # of one output
        slot = m.view.op("reshape", slot, shape=shape(m.indices))
    zero = Scalar(0.0) if bias is None and is_zero(none_of(x)) else None
    return Routed(slot, wanted, zero)


def _rows(m: Mixture, x: Case, inputs: Dim) -> Value:
    """[tokens, K], or [tokens, k, K]."""
    own = features(x.layout) if isinstance(x, Shared) else x.features if isinstance(x, Routed) else ()
    found = m.form(x, own)
    row = None if isinstance(found, Scalar) else shape(found)
    if (
        isinstance(found, Scalar)
        or row is None
        or row[: m.rank] != m.tokens
        or row[m.rank + 1 :] != (inputs,)
    ):
        raise Unseen("what an expert's linear reads is not one row for each token")
    return found if row[m.rank] != 1 else m.view.op("reshape", found, shape=(*m.tokens, inputs))


# --- moves


def reshape(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    return m.case(_operands(ops, 0), regrouped(layout, shape(_alike(ops).args[0])))


def transpose(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    found = m.case(_operands(ops, 0), transposed(layout, cast("tuple[int, ...]", _alike(ops).attrs["perm"])))
    if isinstance(found, Routed) and len(found.features) > 1:
        raise Unseen("features change places")
    return found


def expand(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    return m.case(_operands(ops, 0), layout)


def slice_(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    """Of features; or, of a value for each expert, that expert's."""
    first, axis = ops[0], cast(int, attribute(ops[0], "axis"))
    same = all(op.args == first.args and attribute(op, "axis") == axis for op in ops)
    picked = [(attribute(op, "start"), attribute(op, "stop"), attribute(op, "step")) for op in ops]
    if same and len(ops) > 1 and picked == [(e, e + 1, 1) for e in range(m.count)]:
        return m.case(first.args[:1], (*layout[:axis], m.experts, *layout[axis + 1 :]))
    return _cut(m, ops, 0, layout)


def split(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    places = {op.outs.index(cast(Value, a)) for op, a in zip(ops, args, strict=True)}
    if len(places) > 1:
        raise Unseen("experts take different parts of a split")
    return _cut(m, ops, places.pop(), layout)


def _cut(m: Mixture, ops: Sequence[Op], index: int, layout: Layout) -> Case:
    op = _alike(ops)
    axis = cast(int, attribute(op, "axis"))
    if len(layout[axis]) > 1 or features(layout[axis : axis + 1]) != layout[axis]:
        raise Unseen(f"{op.kind} takes some of the experts, slots or tokens")
    whole = feature(shape(op.args[0])[axis])
    found = m.case(_operands(ops, 0), (*layout[:axis], whole, *layout[axis + 1 :]))
    if not isinstance(found, Routed) or isinstance(found.slot, Scalar) or not whole:
        raise Unseen(f"{op.kind} of a choice is not followed")
    if whole[0] not in found.features:  # the same for all of them
        return found
    attrs: dict[str, Any] = {**op.attrs, "axis": m.rank + 1 + found.features.index(whole[0])}
    part = m.view.ops(op.kind, found.slot, loc=None, **attrs)[index]
    wanted = tuple(atom for a in found.features for atom in (layout[axis] if a == whole[0] else (a,)))
    if not layout[axis]:
        sizes = (*shape(part)[: m.rank + 1], *(a.size for a in wanted))
        part = m.view.op("reshape", part, shape=sizes)
    return Routed(part, wanted, found.none)


def concat(m: Mixture, ops: Sequence[Op], args: Args, layout: Layout) -> Case:
    """A value for each expert, joined along an axis of theirs."""
    op, axis = _alike(ops), cast(int, attribute(ops[0], "axis"))
    if len(ops) > 1 or layout[axis] != m.experts or len(op.args) != m.count:
        raise Unseen("a concat is not one of a value for each expert")
    return m.case(op.args, (*layout[:axis], (), *layout[axis + 1 :]))


RULES: dict[str, Rule] = {
    "": pointwise,
    "sum": reduced,
    "max": reduced,
    "linear": linear,
    "matmul": matmul,
    "reshape": reshape,
    "transpose": transpose,
    "expand": expand,
    "slice": slice_,
    "split": split,
    "concat": concat,
}
