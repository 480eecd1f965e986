"""Quantise what linears of codes read, per token when it is known, as `quantize` and `dequantize` ops."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph, Op, Value
from ir.rewrite import Replacement, Rule, View, rewrite
from ir.types import DType
from passes.base import Pass, Result, result
from passes.linears import LINEARS
from passes.match import dtype, is_constant
from passes.rows_of import dequantize_of

NONE = "none"
_ERROR = {"i8": 0.1, "f8e4m3": 0.25}
_CODES = {"i8": (DType.U4, DType.I8, DType.U8), "f8e4m3": (DType.F8E4M3,)}  # of weights that go with them


@dataclass(frozen=True)
class QuantizeActivations(Pass):
    """dtype: "i8", for weights of integer codes, "f8e4m3", for those of f8e4m3, or "none".

    group_size: elements of a token that share a scale, 0 all of them.
    """

    dtype: str = NONE
    group_size: int = 32

    def __post_init__(self) -> None:
        if self.dtype != NONE and self.dtype not in _CODES:
            raise ValueError(f"quantize_activations: dtype must be i8, f8e4m3 or none, not {self.dtype!r}")
        if self.group_size < 0:
            raise ValueError(
                f"quantize_activations: group_size must not be negative, but is {self.group_size}"
            )

    @property
    def tolerance(self) -> float:
        return _ERROR.get(self.dtype, 0.0)

    def run(self, graph: Graph) -> Result:
        if self.dtype == NONE:
            return Result(graph, 0)
        return result(rewrite(graph, (Rule("quantize activation", LINEARS, self.apply),)))

    def applies(self, codes: DType | None) -> bool:
        """Whether it quantises what linears of such codes read."""
        return codes in _CODES.get(self.dtype, ())

    def apply(self, op: Op, view: View) -> Replacement | None:
        x, matrix = op.args[:2]
        codes = dequantize_of(view.producer, matrix)
        if codes is None or not self.applies(dtype(codes.args[0])):
            return None
        if not isinstance(x, Value) or is_constant(view, x) or view.made_by(x, "dequantize") is not None:
            return None
        q, scale = view.ops("quantize", x, dtype=self.dtype, group_size=self.group_size)
        rounded = view.op("dequantize", q, scale, group_size=self.group_size, dtype=str(dtype(x)))
        return view.op(op.kind, rounded, *op.args[1:], **op.attrs)
