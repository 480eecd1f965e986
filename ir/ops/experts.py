"""Linears of which each token uses a few: the matrices of E experts stacked, and each token's experts.

Rows e*N..e*N+N-1 of the stacked matrix [E*N,K] are expert e's. The experts of a token are its last axis: each
is a slot. Slots read the same row x [..,K], or one each, x [..,k,K].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall
from ir.ops.linear import LINEAR_ATTRS, check_floats, linear_reference, linear_shape
from ir.ops.quantize import QLINEAR_ATTRS, check_qlinear, qlinear_reference
from ir.types import Tensor, Type


def _moe_linear(call: Call) -> tuple[Type, ...]:
    plain = (*call.types[:2], *call.types[3:])
    check_floats(Call(call.kind, plain, call.attrs))
    return _shape(call, call.tensor(1), call.tensor(2), call.optional(3))


def _qmoe_linear(call: Call) -> tuple[Type, ...]:
    q = check_qlinear(Call(call.kind, _without_experts(call.types), call.attrs))
    return _shape(call, q, call.tensor(3), call.optional(6))


def _shape(call: Call, w: Tensor, experts: Tensor, bias: Tensor | None) -> tuple[Type, ...]:
    """The result [..,k,N] of a stacked matrix w."""
    x, count = call.tensor(0), call.integer("num_experts", 1)
    if not experts.dtype.is_integer or experts.rank < 1:
        call.fail(f"experts must be integers [..,k], not {experts.dtype}{list(experts.shape)}")
    rows = w.shape[0] if w.rank == 2 else None
    if not isinstance(rows, int) or rows % count:
        call.fail(f"w {list(w.shape)} is not [E*N,K] of {count} experts")
    if x.shape[:-1] not in (experts.shape[:-1], experts.shape) or x.rank < 1:
        call.fail(f"x {list(x.shape)} is neither [..,K] nor [..,k,K] of experts {list(experts.shape)}")
    outputs = rows // count
    if bias is not None and (bias.shape != (count, outputs) or not bias.dtype.is_float):
        call.fail(f"bias {bias.dtype}{list(bias.shape)} is not floats [{count}, {outputs}]")
    slots = Tensor(x.dtype, (*experts.shape, x.shape[-1]))
    return linear_shape(call, slots, Tensor(w.dtype, (outputs, w.shape[1])), None, None)


def _without_experts(args: Sequence[Any]) -> tuple[Any, ...]:
    """The operands of qmoe_linear that qlinear has too, in its order: x, q, scale, zero?, offset?."""
    return (*args[:3], *args[4:6])


def _moe_linear_reference(call: RefCall) -> tuple[Array]:
    stacked, experts, bias = (call.args[1],), call.args[2], call.arg(3)
    return _per_expert(call, stacked, experts, bias, linear_reference)


def _qmoe_linear_reference(call: RefCall) -> tuple[Array]:
    (_, q, scale, experts, zero, offset, bias) = (call.arg(i) for i in range(7))
    return _per_expert(call, (q, scale, zero, offset), experts, bias, qlinear_reference)


def _per_expert(call: RefCall, stacked: tuple[Any, ...], experts: Array, bias: Any, reference: Any) -> Any:
    """Each expert's linear on the rows of its slots. Raises IndexError on an expert that is not there.

    stacked: arrays of E*N rows, or None.
    """
    x, count = call.args[0], call.attrs["num_experts"]
    if experts.size and not (0 <= experts.min() and experts.max() < count):
        raise IndexError(f"experts {experts.min()}..{experts.max()} leave an axis of {count}")
    outputs = stacked[0].shape[0] // count
    slots = x if x.ndim > experts.ndim else np.broadcast_to(x[..., None, :], (*experts.shape, x.shape[-1]))
    out = np.zeros((*experts.shape, outputs // 2 if call.attrs["gated"] else outputs), x.dtype)
    for expert in np.unique(experts):
        chosen, span = experts == expert, slice(expert * outputs, (expert + 1) * outputs)
        parts = [a if a is None else a[span] for a in stacked]
        args = (slots[chosen], *parts, None if bias is None else bias[expert])
        (out[chosen],) = reference(RefCall(call.kind, args, call.attrs, call.float_type))
    return (out,)


OPS: tuple[OpDef, ...] = (
    OpDef(
        "moe_linear", ("x", "w", "experts", "b?"), _moe_linear, _moe_linear_reference,
        {"num_experts": REQUIRED, **LINEAR_ATTRS},
    ),
    OpDef(
        "qmoe_linear", ("x", "q", "scale", "experts", "zero?", "offset?", "b?"),
        _qmoe_linear, _qmoe_linear_reference, {"num_experts": REQUIRED, **QLINEAR_ATTRS},
    ),
)  # fmt: skip
