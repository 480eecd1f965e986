"""ONNX files of other exporters, with nodes, attributes, arrays and declarations changed, bytes flipped."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx

from compiler.importers.onnx.load import load_onnx
from compiler.pipeline import pipeline, run_pipeline
from compiler.refusal import OF_A_MODEL
from compiler.weights import read_as
from ir.interpret import interpret
from ir.text import parse, print_graph
from runtime.errors import OctavoError
from tests.fuzz import mutate
from tests.fuzz.fuzzer import Fuzzer

DATA = Path(__file__).parents[1] / "data" / "onnx"
CONTEXT, LENGTH = 64, 5
FORMS = {
    "llama": ("dynamo23", "genai-int4", "legacy-past"),
    "gpt2": ("dynamo18",),
    "gemma2": ("genai-fp32", "dynamo24"),
}
OPS = (
    *("Add", "Mul", "MatMul", "Gather", "Reshape", "Transpose", "Concat", "Slice", "Expand", "Shape", "Cast"),
    *("Softmax", "Where", "Range", "Split", "Unsqueeze", "If", "Loop", "Attention", "GroupQueryAttention"),
    *("MatMulNBits", "Constant", "ConstantOfShape", "NotAnOp", ""),
)
TYPES = (*range(24), 99)  # of TensorProto


@cache
def models() -> tuple[tuple[bytes, bytes], ...]:
    """The files, and that of each with its arrays, empty where it holds them itself."""
    found = []
    for name, forms in FORMS.items():
        with tarfile.open(DATA / f"{name}.tar.xz") as tar:
            held = {m.name: tar.extractfile(m) for m in tar.getmembers()}
            for form in forms:
                graph, arrays = (held.get(f"{form}/model.onnx{end}") for end in ("", ".data"))
                assert graph is not None
                found.append((graph.read(), arrays.read() if arrays is not None else b""))
    return tuple(found)


def make(rng: Random, folder: Path) -> None:
    graph, arrays = rng.choice(models())
    model = onnx.ModelProto.FromString(graph)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        rng.choice(CHANGES)(rng, model)
    data = model.SerializeToString()
    if rng.random() < 0.1:
        data = mutate.flipped(rng, data, rng.choice((None, 2000)))
    (folder / "model.onnx").write_bytes(data)
    if arrays:
        most = len(arrays) if rng.random() < 0.95 else rng.randrange(len(arrays))
        (folder / "model.onnx.data").write_bytes(arrays[:most])
        if rng.random() < 0.03:
            mutate.replace_by_link(rng, folder / "model.onnx.data", folder.parent / "outside")


def _nodes(rng: Random, model: Any) -> Any:
    """Those of the graph, or of one of its functions."""
    if model.functions and rng.random() < 0.3:
        return rng.choice(model.functions).node
    return model.graph.node


def _kind(rng: Random, model: Any) -> None:
    node = rng.choice(_nodes(rng, model))
    if rng.random() < 0.2:
        node.domain = rng.choice(("", "com.microsoft", "ai.onnx.ml", "pkg.other"))
    else:
        node.op_type = rng.choice((*OPS, rng.choice(model.graph.node).op_type))


def _wiring(rng: Random, model: Any) -> None:
    nodes = _nodes(rng, model)
    node, other = rng.choice(nodes), rng.choice(nodes)
    names = [*other.input, *other.output, *(t.name for t in model.graph.initializer[:5]), "", "nowhere"]
    side = node.input if rng.random() < 0.8 and node.input else node.output
    choice = rng.randrange(4)
    if choice == 0 and side:
        del side[rng.randrange(len(side))]
    elif choice == 1:
        side.append(rng.choice(names))
    elif side:
        side[rng.randrange(len(side))] = rng.choice(names)


def _count(rng: Random, model: Any) -> None:
    """A node is left out, twice there, or somewhere else."""
    nodes = _nodes(rng, model)
    at = rng.randrange(len(nodes))
    if rng.random() < 0.6:
        node = onnx.NodeProto.FromString(nodes[at].SerializeToString())
        nodes.insert(rng.randrange(len(nodes)), node)
    if rng.random() < 0.7:
        del nodes[at]


def _attribute(rng: Random, model: Any) -> None:
    holders = [node for node in _nodes(rng, model) if node.attribute]
    if not holders:
        return
    attributes = rng.choice(holders).attribute
    found = rng.choice(attributes)
    choice = rng.randrange(7)
    if choice == 0:
        found.i = _integer64(rng)
    elif choice == 1:
        found.f = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e30, 0.5))
    elif choice == 2 and found.ints:
        found.ints[rng.randrange(len(found.ints))] = _integer64(rng)
    elif choice == 3:
        found.ints.extend([_integer64(rng)] * rng.choice((1, 2, 3000)))
    elif choice == 4:
        found.type = rng.randrange(15)
    elif choice == 5:
        found.name = rng.choice((*mutate.TEXTS, "axis", "perm", "to", "num_heads", "bits")).replace("\0", "")
    else:
        attributes.remove(found)


def _array(rng: Random, model: Any) -> None:
    arrays = model.graph.initializer
    found = rng.choice(arrays)
    choice = rng.randrange(8)
    if choice == 0:
        found.dims.append(_integer64(rng))
    elif choice < 3 and found.dims:
        found.dims[rng.randrange(len(found.dims))] = _integer64(rng)
    elif choice == 3:
        found.data_type = rng.choice(TYPES)
    elif choice == 4:
        found.raw_data = mutate.flipped(rng, found.raw_data)
    elif choice == 5:
        found.name = rng.choice(arrays).name if rng.random() < 0.5 else rng.choice(mutate.TEXTS)
    elif choice == 6:
        _external(rng, found)
    elif found.raw_data and found.data_type == onnx.TensorProto.INT64:
        content = np.frombuffer(found.raw_data, np.int64).copy()
        content[rng.randrange(len(content)) if len(content) else slice(None)] = _integer64(rng)
        found.raw_data = content.tobytes()


def _external(rng: Random, tensor: Any) -> None:
    outside = ("../outside/secret", "/etc/passwd", "model.onnx", "", ".", "a\0b", "nowhere.data")
    entries = {"location": rng.choice(outside)}
    for key in ("offset", "length", "checksum"):
        if rng.random() < 0.6:
            entries[key] = str(rng.choice((0, 16, 4096, mutate.integer(rng), "x", "1e3")))
    tensor.data_location = 1
    for key, value in entries.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value


def _declaration(rng: Random, model: Any) -> None:
    choice = rng.randrange(6)
    if choice == 0 and model.opset_import:
        rng.choice(model.opset_import).version = rng.choice((0, 1, 7, 17, 26, 10**6, -1))
    elif choice == 1:
        model.ir_version = _integer64(rng)
    elif choice == 2:
        side = model.graph.input if rng.random() < 0.5 else model.graph.output
        if side:
            info = rng.choice(side)
            info.name = rng.choice((*mutate.TEXTS, "input_ids", "logits", "past_key_values.0.key"))
    elif choice == 3 and model.graph.input:
        dims = rng.choice(model.graph.input).type.tensor_type.shape.dim
        if dims:
            rng.choice(dims).dim_value = _integer64(rng)
    elif choice == 4 and model.graph.input:
        rng.choice(model.graph.input).type.tensor_type.elem_type = rng.choice(TYPES)
    elif model.graph.output:
        del model.graph.output[0]


def _integer64(rng: Random) -> int:
    return (mutate.integer(rng) + 2**63) % 2**64 - 2**63


CHANGES: tuple[Callable[[Random, Any], None], ...] = (
    _kind,
    _wiring,
    _wiring,
    _count,
    _attribute,
    _attribute,
    _array,
    _array,
    _declaration,
)


def read(folder: Path) -> str:
    """What is imported is whole: its text parses back, it runs, and it is lowered or refused by an op."""
    imported = load_onnx(folder / "model.onnx", CONTEXT)
    graph, weights = imported.graph, {w.name: w for w in imported.graph.weights}
    assert print_graph(parse(print_graph(graph))) == print_graph(graph)

    def array(name: str) -> Any:
        return read_as(imported.weights, weights[name])

    ids = np.arange(1, LENGTH + 1, dtype=np.int32)[None] % imported.info.vocab_size
    given = {"ids": ids, "pos": np.arange(LENGTH, dtype=np.int32)[None]}
    with np.errstate(all="ignore"):
        logits = interpret(graph, given, {name: array(name) for name in weights}).outputs[0]
    assert logits.shape == (1, LENGTH, imported.info.vocab_size)
    try:
        run_pipeline(graph, pipeline(read=array))
    except OF_A_MODEL as error:
        assert str(error)
        return "imported, not lowered"
    return "lowered"


FUZZERS = (
    Fuzzer("onnx", make, read, ("compiler/importers/onnx/load.py", "compiler/importers/onnx/walk.py"),
           refusals=(OctavoError, IndexError)),
)  # fmt: skip
