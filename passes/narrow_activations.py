"""Round what linears with bf16 weights read to bf16, as explicit `cast` ops: a bf16 dot product takes no f32.
So is what linears with dequantised weights read, where it is no codes itself.

Results keep their type: products are exact and summed in f32. Casts of one value are for `cse` to share, and
for `fuse_casts` to fold into the op that makes the value.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph, Op, Value
from ir.rewrite import Replacement, Rule, View, rewrite
from ir.types import DType
from passes.base import BF16_ERROR, Pass, Result, result
from passes.linears import LINEARS
from passes.match import dtype, is_constant
from passes.rows_of import dequantize_of


@dataclass(frozen=True)
class NarrowActivations(Pass):
    """dtype: "bf16", or "f32" to leave every activation as it is."""

    dtype: str = "f32"

    def __post_init__(self) -> None:
        if self.dtype not in ("f32", "bf16"):
            raise ValueError(f"narrow_activations: dtype must be f32 or bf16, not {self.dtype!r}")

    @property
    def tolerance(self) -> float:
        return BF16_ERROR if self.dtype == "bf16" else 0.0

    def run(self, graph: Graph) -> Result:
        return result(rewrite(graph, _RULES)) if self.dtype == "bf16" else Result(graph, 0)


def _narrow(op: Op, view: View) -> Replacement | None:
    x, w = op.args[:2]
    if not isinstance(x, Value) or is_constant(view, x) or dtype(x) is not DType.F32:
        return None
    coded = dequantize_of(view.producer, w) is not None and view.made_by(x, "dequantize") is None
    if not coded and dtype(w) is not DType.BF16:
        return None
    narrow = view.op("cast", x, dtype="bf16", name=f"{x.name}.bf16")
    return view.op(op.kind, narrow, *op.args[1:], **{**op.attrs, "dtype": str(dtype(op.out))})


_RULES = (Rule("narrow", LINEARS, _narrow),)
