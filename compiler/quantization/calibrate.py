"""Fitting matrices and keys to text: one run of the model, layer after layer, in the reference interpreter.

Each linear sees the inputs that it will have once those before it are quantised. Its matrix is fitted there
and then, written to a store, and used from then on, so that no more than a layer is ever in memory. Experts'
matrices are rounded to the nearest, one by one: the text takes few tokens, or none, to each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compiler.errors import CompileError
from compiler.quantization.awq import awq
from compiler.quantization.gptq import gptq
from compiler.quantization.grid import Array, Grid, Quantized, UnfitError
from compiler.quantization.keys import KeyStatistics
from compiler.quantization.rtn import round_to_nearest
from compiler.quantization.store import Store
from compiler.quantization.text import Windows, num_blocks, packed
from ir.graph import Graph, Op, Value, Weight
from ir.interpret import WeightReader, empty_kv, reference
from ir.ops import RefCall
from ir.ops.quantize import dequantize, quantize_dynamic
from ir.stream import in_place, stream
from ir.types import KV, DType
from passes.linears import LINEARS
from passes.paging.formats import KeyGrid
from passes.quantize_activations import QuantizeActivations
from passes.quantize_weights import Codes, find_matrices

Report = Callable[[int, int], None]


@dataclass
class Fitted:
    """What calibration found: codes by the matrix's name, and how keys are shifted and scaled, by their
    loc.
    """

    codes: dict[str, Codes] = field(default_factory=dict[str, Codes])
    keys: dict[str, KeyGrid] = field(default_factory=dict[str, KeyGrid])


@dataclass
class Calibration:
    """One run. grids: of each matrix that is fitted, by its name. keys: whether keys are looked at."""

    graph: Graph  # paged, not quantised yet
    read: WeightReader
    grids: Mapping[str, Grid]
    algorithm: str
    activations: QuantizeActivations
    store: Store
    keys: bool = False
    report: Report = lambda done, total: None
    found: Fitted = field(default_factory=Fitted)

    def run(self, text: Windows) -> Fitted:
        """Raises CompileError for a matrix that cannot be quantised, by name."""
        states = {v.name: v.type for v in self.graph.inputs if isinstance(v.type, KV)}
        inputs = packed(text.ids, {name: kv.block for name, kv in states.items()})
        empty = {name: empty_kv(kv, num_blocks(text.ids, kv.block)) for name, kv in states.items()}
        visited = [op.out.name for op in self._linears] + [op.out.name for op in self._attentions]
        self._statistics = KeyStatistics()
        self._last = self._dead_ends()
        stream(self.graph, {**inputs, **empty}, self.read, (), self._compute, visited)
        if self.keys:
            self.found.keys.update(self._statistics.grids(self.store))
        return self.found

    @property
    def _linears(self) -> list[Op]:
        """The first linear of each matrix that is fitted."""
        uses = {arg.name: [u.op for u in found] for arg, found in find_matrices(self.graph).items()}
        linears = {name: [op for op in ops if op.kind in LINEARS] for name, ops in uses.items()}
        return [linears[name][0] for name in self.grids if linears.get(name)]

    @property
    def _attentions(self) -> list[Op]:
        return [op for op in self.graph.ops if op.kind == "paged_attention"] if self.keys else []

    def _dead_ends(self) -> set[str]:
        """Results of linears that nothing else here depends on, such as the logits: not worth computing."""
        users = self.graph.users()
        return {op.out.name for op in self._linears if not users.get(op.out.name)}

    def _compute(self, op: Op, call: RefCall) -> Sequence[Any]:
        matrix = op.args[1] if op.kind in LINEARS else None
        if isinstance(matrix, Value | Weight) and matrix.name in self.grids:
            return self._linear(op, call, matrix.name)
        if self.keys:
            self._statistics.see(op, call)
        return in_place(op, call)

    def _linear(self, op: Op, call: RefCall, name: str) -> Sequence[Any]:
        x, w = self._rounded(call.args[0], self.grids[name]), call.args[1]
        inputs = x.reshape(-1, x.shape[-1])
        fitted, scale = self._fit(op, np.asarray(w, np.float32), inputs, self.grids[name])
        if name not in self.found.codes:
            self.found.codes[name] = self._put(self._stored_name(op), fitted, scale)
            self.report(len(self.found.codes), len(self.grids))
        if op.out.name in self._last and op.kind == "linear":
            rows = fitted.codes.shape[0] // (2 if call.attrs["gated"] else 1)
            return (np.broadcast_to(np.float32(0), (*x.shape[:-1], rows)),)
        x = x if scale is None else self._rounded(call.args[0] * scale, self.grids[name])
        return reference(op, replace(call, args=(x, fitted.values(), *call.args[2:])))

    def _rounded(self, x: Array, grid: Grid) -> Array:
        """A linear's input as the quantised model has it."""
        return round_activations(x, self.activations, grid.dtype)

    def _fit(self, op: Op, w: Array, x: Array, grid: Grid) -> tuple[Quantized, Array | None]:
        try:
            if op.kind == "moe_linear":
                return round_experts(w, op.attrs["num_experts"], grid), None
            if self.algorithm == "rtn":
                return round_to_nearest(w, grid), None
            hessian = x.T @ x
            if self.algorithm == "awq":
                return awq(w, hessian, np.abs(x).mean(0), grid)
            return gptq(w, hessian, grid), None
        except UnfitError as error:
            todo = f"Check the checkpoint, or keep this layer as it is: --keep {op.loc or op.out.name}"
            raise CompileError(str(error), where=op.loc or op.out.name, todo=todo) from error

    def _stored_name(self, op: Op) -> str:
        """Of the arrays of a linear: that of its weight, or its module's and what was merged there."""
        matrix = op.args[1]
        merged = f"{op.loc}.{op.out.name.rpartition('.')[2]}"
        name = matrix.name.removesuffix(".weight") if isinstance(matrix, Weight) else merged
        return name if f"{name}.q" not in self.store.names else f"{name}.{op.out.name}"

    def _put(self, name: str, fitted: Quantized, scale: Array | None) -> Codes:
        put, grid = self.store.put, fitted.grid
        return Codes(
            put(f"{name}.q", fitted.codes, grid.dtype),
            put(f"{name}.scale", fitted.scale, grid.scale),
            grid.zero,
            None if fitted.offset is None else put(f"{name}.offset", fitted.offset, grid.scale),
            grid.group,
            None if scale is None else put(f"{name}.input_scale", scale, DType.F32),
        )


def round_experts(w: Array, count: int, grid: Grid) -> Quantized:
    """w [E*N, K], rounded to the nearest matrix by matrix, so that one is worked on at a time."""
    found = [round_to_nearest(part, grid) for part in np.split(w, count)]
    offsets = [each.offset for each in found if each.offset is not None]
    return Quantized(
        grid,
        np.concatenate([each.codes for each in found]),
        np.concatenate([each.scale for each in found]),
        np.concatenate(offsets) if offsets else None,
    )


def round_activations(x: Array, how: QuantizeActivations, codes: DType) -> Array:
    """What a linear of such codes reads once activations are quantised, as passes.quantize_activations
    does.
    """
    if not how.applies(codes):
        return x
    q, scale = quantize_dynamic(x, DType(how.dtype), how.group_size, DType.F32)
    return dequantize(q, scale, None, None, how.group_size)
