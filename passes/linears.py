"""Products with a constant matrix, for all tokens or for those that chose an expert: where operands stand."""

from __future__ import annotations

from ir.graph import Arg, Op
from passes.match import operand_named

LINEARS = ("linear", "moe_linear")  # operand 0 is what they read, 1 the matrix
EXPERTS = ("moe_linear", "qmoe_linear")  # of floats and of codes
CODED = {"linear": "qlinear", "moe_linear": "qmoe_linear"}


def experts_of(op: Op) -> Arg:
    """The operand that says which matrix of a stack each slot reads; None where there is one matrix."""
    return operand_named(op, "experts") if op.kind in EXPERTS else None


def bias_of(op: Op) -> Arg:
    return operand_named(op, "b")


def residual_of(op: Op) -> Arg:
    return operand_named(op, "residual") if op.kind == "linear" else None
