"""An ONNX file -> the IR, with what stands beside it: tokenizer and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiler.importers.configuration import inside
from compiler.importers.model import Imported, ModelInfo
from compiler.importers.onnx.beside import Beside
from compiler.importers.onnx.context import Held, Known, Shared
from compiler.importers.onnx.inputs import LENGTH, inputs_of
from compiler.importers.onnx.model_file import Model, in_order, read_model
from compiler.importers.onnx.tensors import AGAIN, OnnxSource, Stored, computed, stored_tensor
from compiler.importers.onnx.walk import Walk, logits_of, plain
from compiler.importers.quantized.keep import keep_grids
from compiler.importers.quantized.source import MatrixSource, PartSource
from compiler.importers.refused import ImportRefused
from compiler.weights import ArraySource, LayeredSource, WeightSource, check_weights
from ir.build import GraphBuilder
from ir.graph import Graph, Value, Weight
from ir.types import DType, Tensor
from passes.dce import Dce
from runtime.errors import shown

MAX_LITERAL = 1 << 10  # integers of an array that is a constant and no weight


def load_onnx(path: Path, max_context: int | None = None, *, keep_grid: bool = False) -> Imported:
    """Import a file. Raises ImportRefused or WeightError.

    keep_grid: leave quantised matrices as they are; otherwise they are read as the floats they stand for.
    """
    model = read_model(path)
    beside = Beside(path)
    context = max_context or beside.context
    if context is None:
        what = "it does not say how long its sequences may be"
        raise ImportRefused(what, where=str(path), todo="Give --max-context N, or add its config.json")
    return _Import(model, context).run(beside, keep_grid)


class _Import:
    """One import: the arrays of a file under the graph's names, then its nodes."""

    def __init__(self, model: Model, context: int) -> None:
        self.model, self.where = model, str(model.path)
        self.build = GraphBuilder(model.path.stem, {"S": (1, context)})
        self.stored: dict[str, Stored] = {}
        self.source = OnnxSource({}, self.where)
        self.shared = Shared(self.build, context, self.stored, self._read)

    def _read(self, name: str) -> Any:
        return self.source.array(self.stored[name])

    def run(self, beside: Beside, keep_grid: bool) -> Imported:
        graph = self.graph()
        sources: list[WeightSource] = [
            ArraySource(self.shared.arrays),
            MatrixSource(OnnxSource(self.stored, self.where), self.shared.matrices, frozenset()),
        ]
        if keep_grid and not self.shared.matrices:
            what = "no weights that are quantised in a way that is kept: there is no grid of its own"
            raise ImportRefused(what, where=self.where, todo="Compile it as floats, or quantise it here")
        check_weights(graph, LayeredSource(sources), self.where)
        if keep_grid:
            graph, orders = keep_grids(graph, self.shared.matrices)
            sources = [PartSource(self.shared.matrices), orders, *sources]
        info = self._info(graph, beside)
        tokenizer, constants = beside.tokenizer(), tuple(self.shared.arrays)
        return Imported(graph, LayeredSource(sources), info, tokenizer, constants=constants)

    def graph(self) -> Graph:
        proto = self.model.graph
        ids = self.build.input("ids", Tensor(DType.I32, (1, LENGTH)))
        self.build.input("pos", Tensor(DType.I32, (1, LENGTH)))
        env: dict[str, Held] = {}
        if proto.sparse_initializer:
            raise ImportRefused("sparse arrays are not read", where=self.where, todo=AGAIN)
        for tensor in proto.initializer:
            if tensor.name in env:
                what = f"{shown(tensor.name)} is stored twice"
                raise ImportRefused(what, where=self.where, todo=AGAIN)
            env[tensor.name] = self.array(tensor)
        given = [info for info in proto.input if info.name not in env]
        env.update(inputs_of(given, ids, self.where))
        nodes = in_order(proto.node, env, self.where)
        Walk(self.model, self.shared, self.source.array).run(nodes, env)
        return self._named(logits_of(proto.output, env, self.shared))

    def array(self, tensor: Any) -> Held:
        """A weight; a constant where it is one number, or few integers."""
        found = stored_tensor(tensor, self.model.path.parent, self.where)
        dtype = computed(found.type.dtype)
        count = 1
        for n in found.type.shape:
            count *= int(n)  # type: ignore[arg-type]
        if count <= (1 if dtype.is_float else MAX_LITERAL) and dtype in (DType.F32, DType.I32, DType.BOOL):
            return Known(plain(self.source.array(found)))
        same = next((n for n, s in self.stored.items() if found.place and s.place == found.place), None)
        name = same or self.build.unique(tensor.name)
        self.stored[name] = found
        return Weight(name, Tensor(dtype, found.type.shape))

    def _named(self, logits: Value) -> Graph:
        """The output under the name `logits`, where it is the last op's."""
        last = self.build.ops[-1]
        if logits.name != "logits" and last.outs == (logits,):
            logits = Value(self.build.unique("logits"), logits.type)
            self.build.ops[-1] = type(last)(last.kind, last.args, last.attrs, (logits,), last.loc)
        return Dce().run(self.build.graph((logits,))).graph

    def _info(self, graph: Graph, beside: Beside) -> ModelInfo:
        vocab: Any = graph.outputs[0].type.shape[2]  # type: ignore[union-attr]
        used = {w.name for w in graph.weights}
        files = {s.path for s in self.stored.values() if s.path is not None} | {self.model.path}
        where = self.model.path.parent
        return ModelInfo(
            name=self.model.path.parent.name if self.model.path.stem == "model" else self.model.path.stem,
            vocab_size=int(vocab),
            max_context=self.shared.context,
            bos_token_id=next(iter(inside(beside.bos, int(vocab))), None),
            eos_token_ids=inside(beside.eos, int(vocab)),
            source_kind="onnx",
            source_path=str(self.model.path),
            source_files=tuple(sorted(str(f.relative_to(where)) for f in files)),
            unused=tuple(n for n in self.stored if n not in used),
        )
