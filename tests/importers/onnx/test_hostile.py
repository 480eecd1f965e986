"""Files that lie: each is refused by name, on one line, before it costs memory or reads other files."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compiler.errors import CompileError
from compiler.importers.onnx.load import load_onnx
from compiler.survey import survey
from tests.importers.onnx.graphs import CONTEXT, WIDTH, Sketch, saved

MAX_SECONDS, MAX_BYTES = 5.0, 200 << 20


def _small(change: Callable[[Any], object] = lambda model: None) -> Any:
    sketch = Sketch()
    model = sketch.model(sketch.add("Add", sketch.add("Tanh", "x"), sketch.array(np.ones(WIDTH, np.float32))))
    change(model)
    return model


def refused(model: Any, folder: Path, match: str) -> None:
    path = model if isinstance(model, Path) else saved(model, folder)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CompileError, match=match) as raised:
        load_onnx(path, CONTEXT)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    assert time.process_time() - start < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES
    assert survey(path).kind in ("onnx", "unknown")  # and nothing is raised where nothing is refused


def _node(kind: str, inputs: list[str], output: str, **attrs: Any) -> Callable[[Any], object]:
    """Puts a node before the others, of which the first then reads its result."""

    def change(model: Any) -> None:
        model.graph.node.insert(1, helper.make_node(kind, inputs, [output], **attrs))
        model.graph.node[2].input[0] = output

    return change


def _stored(name: str, array: Any) -> Callable[[Any], object]:
    return lambda model: model.graph.initializer.append(numpy_helper.from_array(array, name))


def _external(model: Any, location: str, **entries: str) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == "table")
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    assert data


def test_the_model_itself_is_read(tmp_path: Path) -> None:
    assert load_onnx(saved(_small(), tmp_path), CONTEXT).info.vocab_size == WIDTH


def test_a_cycle(tmp_path: Path) -> None:
    model = _small()
    model.graph.node[1].input[0] = model.graph.node[2].output[0]
    refused(model, tmp_path, r"its nodes form a cycle: Tanh reads what is computed from its own result")


def test_nodes_in_another_order_are_sorted(tmp_path: Path) -> None:
    model = _small()
    nodes = [model.graph.node[i] for i in (2, 0, 1)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    assert [op.kind for op in load_onnx(saved(model, tmp_path), CONTEXT).graph.ops] == [
        "embed",
        "tanh",
        "add",
    ]


def test_a_name_that_nothing_makes(tmp_path: Path) -> None:
    model = _small()
    model.graph.node[1].input[0] = "nowhere"
    refused(model, tmp_path, r"Tanh reads 'nowhere', which nothing makes")


def test_a_name_that_is_made_twice(tmp_path: Path) -> None:
    model = _small(lambda m: m.graph.node.append(helper.make_node("Tanh", ["x"], ["x"])))
    refused(model, tmp_path, "'x' is made twice")
    refused(_small(_stored("table", np.zeros(3))), tmp_path, "'table' is stored twice")


@pytest.mark.parametrize("dims", [[3, 9], [-1, 4], [2**40, 2**40], [1] * 40])
def test_a_wrong_shape(tmp_path: Path, dims: list[int]) -> None:
    def change(model: Any) -> None:
        model.graph.initializer[0].ClearField("dims")
        model.graph.initializer[0].dims.extend(dims)

    refused(_small(change), tmp_path, "tensor 'table'.*|has the shape|its shape")


def test_a_shape_that_does_not_fit_the_others(tmp_path: Path) -> None:
    change = _node("MatMul", ["x", "wide"], "y")

    def both(model: Any) -> None:
        change(model)
        _stored("wide", np.zeros((WIDTH + 1, 3), np.float32))(model)

    refused(_small(both), tmp_path, r"MatMul in m|do not fit")


@pytest.mark.parametrize("entries", [{}, {"length": str(2**31)}, {"offset": str(2**31)}, {"offset": "-8"}])
def test_two_gigabytes_in_a_file_of_a_thousand_bytes(tmp_path: Path, entries: dict[str, str]) -> None:
    (tmp_path / "data").write_bytes(b"\0" * 1000)
    model = _small()
    model.graph.initializer[0].ClearField("dims")
    model.graph.initializer[0].dims.extend([2**26, WIDTH])
    _external(model, "data", **entries)
    refused(model, tmp_path, "tensor 'table'")
    model = _small()
    model.graph.initializer[0].ClearField("dims")
    model.graph.initializer[0].dims.extend([2**26, WIDTH])
    refused(model, tmp_path, "takes 2147483648 bytes, and it has")


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../outside", "a/../../outside", "", "link", "pipe", "no"]
)
def test_data_outside_of_the_directory(tmp_path: Path, location: str) -> None:
    import os

    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside").write_bytes(b"\0" * 4096)
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "pipe")
    model = _small()
    _external(model, location)
    refused(model, folder, "outside of the model's directory|is no file")


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08\x08", b"PK\x03\x04"])
def test_what_is_no_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    refused(tmp_path / "model.onnx", tmp_path, "not an ONNX model")


def test_a_truncated_model(tmp_path: Path) -> None:
    whole = _small().SerializeToString()
    for size in range(1, len(whole) - 1, 29):
        (tmp_path / "model.onnx").write_bytes(whole[:size])
        with pytest.raises(CompileError):
            load_onnx(tmp_path / "model.onnx", CONTEXT)


BOMBS = {
    "ConstantOfShape": lambda s: s.add("ConstantOfShape", s.ints(2**20, 2**20)),
    "Range": lambda s: s.add("Range", s.array(0.0), s.array(1e12), s.array(1e-3)),
    "Expand": lambda s: s.add("Expand", s.array(np.float32(1)), s.ints(2**20, 2**20)),
    "Tile": lambda s: s.add("Tile", s.array(np.ones((4, 4), np.float32)), s.ints(2**30, 2**30)),
    "Add": lambda s: s.add("Add", s.array(np.arange(1000).reshape(-1, 1)), s.array(np.arange(1000))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_constants_that_are_computed_stay_small(tmp_path: Path, name: str) -> None:
    sketch = Sketch()
    made = BOMBS[name](sketch)
    size = sketch.add("Cast", sketch.add("ReduceSum", made, keepdims=0), to=1)
    model = sketch.model(sketch.add("Add", "x", size))
    path = saved(model, tmp_path)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        load_onnx(path, CONTEXT)
    except CompileError as error:
        assert "\n" not in str(error)
    assert time.process_time() - start < MAX_SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES


def _function(name: str, calls: list[str]) -> Any:
    nodes = [helper.make_node(n, ["a"], [f"b{i}"], domain="own") for i, n in enumerate(calls)]
    nodes.append(helper.make_node("Identity", ["b0"], ["c"]))
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["a"], ["c"], nodes, opsets)


def test_a_function_that_calls_itself(tmp_path: Path) -> None:
    sketch = Sketch(functions=[_function("f", ["f"])])
    refused(
        sketch.model(sketch.add("f", "x", domain="own")),
        tmp_path,
        "more than 16 deep|nodes where they are called",
    )


def test_functions_that_call_each_other_twice(tmp_path: Path) -> None:
    """2**15 calls from a file of two kilobytes."""
    names = [f"f{i}" for i in range(16)]
    functions = [_function(a, [b] * 8) for a, b in zip(names, names[1:], strict=False)]
    last = helper.make_node("Tanh", ["a"], ["c"])
    opsets = [helper.make_opsetid("", 23)]
    functions.append(helper.make_function("own", "f15", ["a"], ["c"], [last], opsets))
    sketch = Sketch(functions=functions)
    refused(sketch.model(sketch.add("f0", "x", domain="own")), tmp_path, "nodes")


def test_an_op_without_a_converter_is_named_with_its_place(tmp_path: Path) -> None:
    sketch = Sketch()
    refused(sketch.model(sketch.add("Det", "x")), tmp_path, r"Det in m: this op has no converter")


@pytest.mark.parametrize(
    ("shape", "match"),
    [(["b", 8], "a fixed length of 8"), ([2, "s"], "a fixed batch of 2"), (["s"], "are the token ids")],
)
def test_sizes_that_are_fixed(tmp_path: Path, shape: list[Any], match: str) -> None:
    model = _small()
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", TensorProto.INT64, shape))
    refused(model, tmp_path, match)


def test_an_input_that_is_not_known(tmp_path: Path) -> None:
    extra = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, [1, 3, 8, 8])
    model = _small(lambda m: m.graph.input.append(extra))
    refused(model, tmp_path, r"it is not known what its input 'pixels' \[1, 3, 8, 8\] of f32 is")


def test_a_table_of_positions_that_ends_before_the_context(tmp_path: Path) -> None:
    sketch = Sketch()
    size = sketch.add("Squeeze", sketch.add("Shape", "ids", start=1, end=2))
    positions = sketch.add("Range", sketch.array(0), size, sketch.array(1))
    rows = sketch.add("Gather", sketch.array(np.zeros((20, WIDTH), np.float32)), positions)
    refused(sketch.model(sketch.add("Add", "x", rows)), tmp_path, "has 20 rows.*--max-context 20")


def test_hostile_names_reach_neither_text_nor_paths(tmp_path: Path) -> None:
    from ir.text import parse, print_graph

    def change(model: Any) -> None:
        for node in model.graph.node:
            node.name = '/a"\n};system("/b'
        model.graph.initializer[0].name = model.graph.node[0].input[0] = '../t"\n}'

    graph = load_onnx(saved(_small(change), tmp_path), CONTEXT).graph
    assert parse(print_graph(graph)) == graph
    assert not any(c in w.name for w in graph.weights for c in '"\n/')


def test_onnx_writes_what_is_read_here(tmp_path: Path) -> None:
    """onnx's own external data, at an offset, below a folder."""
    model = _small()
    (tmp_path / "sub").mkdir()
    onnx.save_model(model, tmp_path / "model.onnx", save_as_external_data=True, location="sub/data",
                    size_threshold=0)  # fmt: skip
    expected = load_onnx(saved(_small(), tmp_path / "sub"), CONTEXT)
    found = load_onnx(tmp_path / "model.onnx", CONTEXT)
    for name in expected.weights.names:
        assert np.array_equal(found.weights.read(name), expected.weights.read(name))
    assert found.info.source_files == ("model.onnx", "sub/data")
