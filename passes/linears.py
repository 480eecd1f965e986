"""Products with a constant matrix, for all tokens or for those that chose an expert: where operands stand."""

from __future__ import annotations

from ir.graph import Arg, Op
from passes.match import operand

LINEARS = ("linear", "moe_linear")  # operand 0 is what they read, 1 the matrix
CODED = {"linear": "qlinear", "moe_linear": "qmoe_linear"}
_BIAS = {"linear": 2, "moe_linear": 3}
_RESIDUAL = {"linear": 3}


def experts_of(op: Op) -> Arg:
    """The operand that says which matrix of a stack each slot reads; None where there is one matrix."""
    return op.args[2] if op.kind == "moe_linear" else None


def bias_of(op: Op) -> Arg:
    return operand(op, _BIAS[op.kind])


def residual_of(op: Op) -> Arg:
    return operand(op, _RESIDUAL[op.kind]) if op.kind in _RESIDUAL else None
