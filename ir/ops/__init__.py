"""The op table: every op kind, declared once."""

from ir.ops import attention, choose, experts, linear, pointwise, quantize, recurrence, reduce, shape
from ir.ops.base import ANNOTATIONS, REQUIRED, Call, InferError, OpDef, RefCall

OPS: dict[str, OpDef] = {
    op.kind: op
    for op in (
        *pointwise.OPS,
        *shape.OPS,
        *reduce.OPS,
        *choose.OPS,
        *linear.OPS,
        *quantize.OPS,
        *experts.OPS,
        *attention.OPS,
        *recurrence.OPS,
    )  # fmt: skip
}

__all__ = ["ANNOTATIONS", "OPS", "REQUIRED", "Call", "InferError", "OpDef", "RefCall"]
