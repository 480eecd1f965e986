"""Small ONNX graphs around single ops, and what onnx's own reference evaluator makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from compiler.importers.onnx.load import load_onnx
from compiler.pipeline import pipeline
from compiler.weights import read_as
from ir.interpret import interpret
from passes.page_kv import PageKv

VOCAB, WIDTH, CONTEXT = 11, 8, 32


@dataclass
class Sketch:
    """Nodes of a graph ids [1, S] -> logits; `x` [1, S, WIDTH] are embeddings of the ids."""

    nodes: list[Any] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)
    functions: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = np.random.default_rng(1).normal(0, 1, (VOCAB, WIDTH)).astype(np.float32)
        self.add("Gather", self.array(table, "table"), "ids", out="x")

    def array(self, value: Any, name: str = "") -> str:
        name = name or f"c{len(self.arrays)}"
        self.arrays[name] = np.asarray(value)
        return name

    def ints(self, *values: int) -> str:
        return self.array(np.array(values, np.int64))

    def add(
        self, kind: str, *args: str, out: str = "", domain: str = "", several: int = 1, **attrs: Any
    ) -> str:
        """The (first) result's name."""
        outs = [out or f"v{len(self.nodes)}", *(f"v{len(self.nodes)}.{i}" for i in range(1, several))]
        self.nodes.append(
            helper.make_node(kind, args, outs, domain=domain, name=f"/m/{len(self.nodes)}", **attrs)
        )
        return outs[0]

    def model(self, logits: str, opset: int = 23, past: Mapping[str, Any] | None = None) -> Any:
        inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"])]
        for name, shape in (past or {}).items():
            kind = TensorProto.FLOAT if len(shape) == 4 else TensorProto.INT64
            inputs.append(helper.make_tensor_value_info(name, kind, shape))
        outputs = [helper.make_tensor_value_info(logits, TensorProto.FLOAT, None)]
        stored = [numpy_helper.from_array(a, n) for n, a in self.arrays.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, stored)
        domains = {n.domain for n in self.nodes if n.domain} | {f.domain for f in self.functions}
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
        return helper.make_model(graph, opset_imports=opsets, functions=self.functions, ir_version=11)


def saved(model: Any, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def both(model: Any, folder: Path, length: int, feeds: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """The logits of the imported graph in the interpreter, and the reference evaluator's."""
    imported = load_onnx(saved(model, folder), CONTEXT)
    ids = np.random.default_rng(length).integers(0, VOCAB, (1, length))
    expected = ReferenceEvaluator(model).run(None, {"ids": ids, **(feeds or {})})[0]
    return run(imported, ids), expected


def run(imported: Any, ids: Any, passes: Sequence[Any] = ()) -> Any:
    weights = {w.name: w for w in imported.graph.weights}
    graph = imported.graph
    for each in passes:
        graph = each.run(graph).graph
    inputs = {"ids": ids.astype(np.int32), "pos": np.arange(ids.shape[1], dtype=np.int32)[None]}
    weights = {w.name: w for w in (*imported.graph.weights, *graph.weights)}
    return interpret(graph, inputs, lambda n: read_as(imported.weights, weights[n])).outputs[0]


def before_paging(imported: Any) -> list[Any]:
    """The passes that recognise attention, norms and rotary embedding."""
    weights = {w.name: w for w in imported.graph.weights}
    passes = pipeline(read=lambda n: read_as(imported.weights, weights[n]))
    return list(passes[: next(i for i, p in enumerate(passes) if isinstance(p, PageKv))])


Make = Callable[[Sketch], str]
