"""Weights are read as they are stored, and a file that is not what it says is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.checkpoint import SafetensorsFile, open_checkpoint
from compiler.weights import ArraySource, LayeredSource, WeightError, check_weights, read_as
from ir.build import GraphBuilder
from ir.graph import Graph, Weight
from ir.types import DType, Tensor

ARRAYS: dict[str, Any] = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": (np.arange(10, dtype=np.float32) / 7).astype(ml_dtypes.bfloat16).reshape(5, 2),
    "scalar": np.array(3, dtype=np.int64),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 4), np.float16),
}


def saved(directory: Path, arrays: dict[str, Any] = ARRAYS, name: str = "model.safetensors") -> Path:
    save_file(arrays, directory / name)
    return directory / name


def raw(directory: Path, header: Any, data: bytes = b"") -> Path:
    """A file with exactly this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = directory / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    source = SafetensorsFile(saved(tmp_path))
    assert set(source.names) == set(ARRAYS)
    for name, array in ARRAYS.items():
        found = source.read(name)
        assert found.dtype == array.dtype and np.array_equal(found, array)
        assert source.type(name).shape == array.shape
        assert not found.flags.owndata and not found.flags.writeable
    assert np.array_equal(source.rows("b", 1, 4), ARRAYS["b"][1:4])


def test_read_as_casts_in_chunks(tmp_path: Path) -> None:
    source = SafetensorsFile(saved(tmp_path))
    found = read_as(source, Weight("b", Tensor(DType.F32, (5, 2))), chunk_rows=2)
    assert found.dtype == np.float32 and np.array_equal(found, ARRAYS["b"].astype(np.float32))


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    saved(tmp_path, {"a": ARRAYS["a"]}, "one.safetensors")
    saved(tmp_path, {"b": ARRAYS["b"]}, "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source, files = open_checkpoint(tmp_path)
    assert np.array_equal(source.read("a"), ARRAYS["a"]) and np.array_equal(source.read("b"), ARRAYS["b"])
    assert [f.name for f in files] == ["model.safetensors.index.json", "one.safetensors", "two.safetensors"]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"a": "missing.safetensors"}, "missing.safetensors, which holds 'a', is missing"),
        ({"a": "../one.safetensors"}, "is not a .safetensors file beside it"),
        ({"a": "one.bin"}, "is not a .safetensors file beside it"),
        ({"z": "one.safetensors"}, "'z' is said to be in one.safetensors"),
        ({}, "has no weight_map"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, mapping: dict[str, str], message: str) -> None:
    saved(tmp_path, {"a": ARRAYS["a"]}, "one.safetensors")
    saved(tmp_path, {"a": ARRAYS["a"]}, "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(WeightError, match=message):
        open_checkpoint(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = path.read_bytes()
    for size in (0, 7, 40, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(WeightError, match="truncated"):
            SafetensorsFile(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, "'a' and 'b' overlap"),
        ({"a": entry("F32", [4], 0, 16)}, r"tensor 'a': bytes 0\.\.16 are not inside"),
        ({"a": entry("F32", [4], 8, 4)}, "are not inside"),
        ({"a": entry("F32", [2], 0, 12)}, r"'a': \[2\] of F32 do not take 12 bytes"),
        ({"a": entry("F32", [-2], 0, 8)}, "non-negative integers"),
        ({"a": {"dtype": "F32"}}, "needs dtype, shape and data_offsets"),
        (["a"], "not a JSON object"),
        (b"{broken", "not valid JSON"),
        (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        SafetensorsFile(raw(tmp_path, header, bytes(12)))


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    with pytest.raises(WeightError, match="a header may have at most"):
        SafetensorsFile(path)


def test_an_unknown_element_type_is_refused_when_it_is_read(tmp_path: Path) -> None:
    source = SafetensorsFile(
        raw(tmp_path, {"a": entry("F8_E5M2", [4], 0, 4), "b": entry("U8", [4], 4, 8)}, bytes(8))
    )
    assert source.type("b").dtype is DType.U8
    with pytest.raises(WeightError, match="tensor 'a': the element type is F8_E5M2"):
        source.read("a")


def test_pickled_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(WeightError, match="pickled .pytorch_model.bin.*save_pretrained"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no weights"):
        open_checkpoint(tmp_path)


def test_layers_answer_in_order_and_under_other_names() -> None:
    first, second = ArraySource({"x": np.zeros(2)}), ArraySource({"x": np.ones(2), "y": np.ones(3)})
    source = LayeredSource((first, second), {"z": "y"})
    assert sorted(source.names) == ["x", "z"]
    assert source.read("x")[0] == 0 and np.array_equal(source.read("z"), np.ones(3))
    with pytest.raises(WeightError, match="no tensor 'w'"):
        source.read("w")


def reading(shape: tuple[int, ...]) -> Graph:
    build = GraphBuilder("g", {}, ())
    return build.graph([build.op("neg", Weight("a", Tensor(DType.F32, shape)))])


def test_missing_and_misshapen_weights_are_refused() -> None:
    check_weights(reading((4, 3)), ArraySource(ARRAYS))
    with pytest.raises(WeightError, match=r"'a': it has shape \[4, 3\] but .* makes it \[3, 4\]"):
        check_weights(reading((3, 4)), ArraySource(ARRAYS))
    with pytest.raises(WeightError, match="1 of the model's tensors are not in the checkpoint: a"):
        check_weights(reading((4, 3)), ArraySource({}))


def test_codes_without_what_scales_them_are_refused(tmp_path: Path) -> None:
    for dtype in (np.int8, np.uint8, ml_dtypes.float8_e4m3fn):
        source = ArraySource({"a": np.zeros((4, 3), dtype)})
        with pytest.raises(WeightError, match="'a': it is stored as .*, codes without what scales"):
            check_weights(reading((4, 3)), source)
