"""Quantised matrices are read as the programs that wrote them read them, bit for bit.

tests/data/quantized.safetensors holds small matrices that other packages packed, and what they unpack them to
(`expected`): GPTQ's by auto-gptq 0.7.1 (its linear of the identity), AWQ's by the steps and the decoder of
autoawq 0.2.9, the others by compressed-tensors 0.20.1. Its metadata is each one's quantization_config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from compiler.checkpoint import SafetensorsFile
from compiler.importers import ImportRefused
from compiler.importers.quantized.detect import quantized_source
from compiler.importers.quantized.gguf import FORMATS, GgufMatrix
from compiler.importers.quantized.matrix import Matrix, float_rows
from compiler.importers.quantized.source import MatrixSource, PartSource
from compiler.weights import Array, ArraySource, WeightError
from ir.types import DType

DATA = Path(__file__).parent.parent / "data/quantized.safetensors"
FILE = SafetensorsFile(DATA)
with safe_open(DATA, "np") as opened:
    CONFIGS: dict[str, Any] = {case: json.loads(text) for case, text in sorted(opened.metadata().items())}
SYMMETRIC = {"gptq-4-sym": 8, "gptq-8-sym": 0, "packed-4": 8, "packed-8": 0, "int-4": 8, "int-8": 0}


def arrays(case: str) -> dict[str, Array]:
    """What is stored of a case, as of the module `m`."""
    names = [n for n in FILE.names if n.startswith(f"{case}/") and not n.endswith("expected")]
    return {f"m.{n.rpartition('/')[2]}": FILE.read(n) for n in names}


def source(
    case: str, changes: dict[str, Any] | None = None, config: dict[str, Any] | None = None
) -> MatrixSource:
    stored = {k: v for k, v in (arrays(case) | (changes or {})).items() if v is not None}
    plain = ArraySource(stored | {"norm.weight": np.ones(3, np.float32)})
    return quantized_source(plain, CONFIGS[case] | (config or {}), "DIR")


def matrix(case: str, **options: Any) -> Matrix:
    found = source(case, **options).matrix("m.weight")
    assert found is not None
    return found


def expected(case: str) -> Array:
    return FILE.read(f"{case}/expected")


@pytest.mark.parametrize("case", CONFIGS)
def test_floats_are_those_of_the_packer(case: str) -> None:
    found, want = source(case), expected(case)
    assert set(found.names) == {"m.weight", "norm.weight"} and found.type("m.weight").shape == want.shape
    for lo, hi in ((0, len(want)), (3, 12), (5, 6), (7, 7)):
        rows = found.rows("m.weight", lo, hi)
        assert rows.dtype == np.float32
        if case.endswith("bf16"):  # the packer rounds its result to the type of the scales
            rows = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.array_equal(rows, want[lo:hi]), (lo, hi)


@pytest.mark.parametrize("case", CONFIGS)
def test_parts_are_of_their_types_whatever_the_rows(case: str) -> None:
    found = matrix(case)
    parts = PartSource({"m.weight": found})
    assert parts.names[:2] == ("m.weight.q", "m.weight.scale")
    for name in parts.names:
        whole, kind = parts.read(name), parts.type(name)
        assert whole.shape == kind.shape and whole.dtype == kind.dtype.numpy
        assert kind.dtype is not DType.U4 or whole.max() <= 15
        for lo, hi in ((0, 8), (3, 12), (9, 10), (5, 5)):
            assert parts.rows(name, lo, hi).tobytes() == whole[lo:hi].tobytes(), (name, lo, hi)


@pytest.mark.parametrize(("case", "zero"), SYMMETRIC.items())
def test_a_zero_that_all_groups_have_is_a_number(case: str, zero: int) -> None:
    grid = matrix(case).grid
    assert grid.zeros is None and grid.offset is None and grid.zero == zero


def test_codes_and_scales_are_the_stored_ones() -> None:
    """By the definitions, not by a product of the two."""
    packed, found = arrays("packed-4"), matrix("packed-4")
    words = packed["m.weight_packed"].view(np.uint32)
    codes = [[word >> np.uint32(4 * i) & 15 for word in row for i in range(8)] for row in words]
    assert np.array_equal(found.rows("q", 0, 24), codes)
    assert found.rows("scale", 0, 24).tobytes() == packed["m.weight_scale"].tobytes()
    gptq, found = arrays("gptq-8"), matrix("gptq-8")
    codes = gptq["m.qweight"].view(np.uint32)[:, None] >> (8 * np.arange(4, dtype=np.uint32))[:, None] & 255
    assert np.array_equal(found.rows("q", 0, 32), codes.reshape(64, 32).T.astype(int) - 128)
    assert found.rows("scale", 0, 32).tobytes() == gptq["m.scales"].T.tobytes()


def test_columns_of_act_order_stand_by_group() -> None:
    found, groups = matrix("gptq-4-order"), arrays("gptq-4-order")["m.g_idx"]
    assert found.order is not None and found.grid.group_size == 32
    assert np.array_equal(groups[found.order], np.arange(96) // 32)
    assert matrix("gptq-4").order is None


@pytest.mark.parametrize("name", FORMATS)
def test_gguf_formats_are_those_of_gguf(name: str) -> None:
    form, kind = FORMATS[name], gguf.GGMLQuantizationType[name]
    rng = np.random.default_rng(len(name))
    rows = rng.integers(0, 256, (9, 3 * form.block_bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q6_K": [208]}.get(name, [0, 2])
    for at in halves:  # scales are finite
        scales = rng.normal(0, 0.1, (9, 3)).astype(np.float16).view(np.uint8).reshape(9, 3, 2)
        rows.reshape(9, 3, -1)[:, :, at : at + 2] = scales
    order = rng.permutation(9)
    want = gguf.dequantize(rows, kind)[order]
    found = GgufMatrix(form, rows, order)
    assert found.grid.shape == want.shape and np.isfinite(want).all()
    for lo, hi in ((0, 9), (2, 7), (4, 5), (3, 3)):
        assert np.array_equal(float_rows(found, lo, hi), want[lo:hi]), (lo, hi)
    for part, kind in found.grid.parts():
        assert (
            found.rows(part, 0, 9).dtype == kind.dtype.numpy
            and found.rows(part, 2, 4).shape[1:] == kind.shape[1:]
        )


def test_the_scheme_of_a_matrix_is_told_by_what_is_stored() -> None:
    """Also where others have the same shapes; zeros that a symmetric one need not have are none."""
    others = {
        f"g{i}": CONFIGS[c]["config_groups"]["group_0"] for i, c in enumerate(("int-8", "packed-8-zero"))
    }
    own = CONFIGS["packed-8-zero"]["config_groups"]["group_0"]
    symmetric = own | {"weights": own["weights"] | {"symmetric": True}}
    both = {"config_groups": {**others, "s": symmetric}}
    assert np.array_equal(source("packed-8-zero", config=both).read("m.weight"), expected("packed-8-zero"))
    zeros = {"m.weight_zero_point": np.zeros((24, 2), np.int8)}
    assert np.array_equal(source("packed-4", zeros).read("m.weight"), expected("packed-4"))
    twice = {"config_groups": {"a": symmetric, "b": own | {"weights": own["weights"] | {"group_size": 64}}}}
    with pytest.raises(WeightError, match=r"with zero points fits 0 of the schemes"):
        source("packed-8-zero", {"m.weight_scale": np.zeros((14, 3), np.float32)}, twice)


F16, I32, I64 = np.float16, np.int32, np.int64
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-4", {"m.scales": None}, "scales is missing"),
    ("gptq-4", {"m.qzeros": None}, "qzeros is missing"),
    ("gptq-4", {"m.qweight": None}, "qweight is missing"),
    ("gptq-4", {"m.qweight": np.zeros((8, 32), F16)}, "qweight is of f16, not of i32"),
    ("gptq-4", {"m.qweight": np.zeros((8, 40), I32)}, r"scales .*\[2, 32\], .* make it \[2, 40\]"),
    ("gptq-4", {"m.qzeros": np.zeros((2, 5), I32)}, r"qzeros has the shape \[2, 5\], which is none of"),
    ("gptq-4", {"m.qzeros": np.zeros((3, 4), I32)}, "qzeros has the shape"),
    ("gptq-4", {"m.scales": np.zeros((3, 32), F16), "m.qzeros": np.zeros((3, 4), I32)}, "3 groups of 64"),
    ("gptq-4", {"m.scales": np.zeros((2, 32), I32)}, "scales is of i32"),
    ("gptq-4", {"m.g_idx": np.full(64, 2, I32)}, r"g_idx names groups 2\.\.2 of 2"),
    ("gptq-4", {"m.g_idx": np.full(64, -1, I32)}, r"g_idx names groups -1\.\.-1 of 2"),
    ("gptq-4", {"m.g_idx": np.zeros(64, I32)}, "does not put 32 columns into each group"),
    ("gptq-4", {"m.g_idx": np.zeros(60, I32)}, r"g_idx has the shape \[60\]"),
    ("awq", {"m.scales": None}, "scales is missing"),
    ("awq", {"m.qzeros": np.zeros((2, 4), I32)}, r"qzeros has the shape \[2, 4\]"),
    ("awq", {"m.scales": np.zeros((1, 40), F16)}, r"scales has the shape \[1, 40\]"),
    ("packed-4", {"m.weight_scale": None}, "weight_scale is missing"),
    ("packed-4", {"m.weight_shape": None}, "weight_shape is missing"),
    ("packed-4", {"m.weight_shape": np.array([24, 2**40], I64)}, "weight_shape is .*1099511627776"),
    ("packed-4", {"m.weight_shape": np.array([24, -64], I64)}, "weight_shape is"),
    ("packed-4", {"m.weight_scale": np.zeros((24, 3), F16)}, r"weight_scale \[24, 3\] .* fits 0 of"),
    ("packed-4-zero", {"m.weight_zero_point": None}, "without zero points fits 0"),
    ("packed-4-zero", {"m.weight_zero_point": np.zeros((2, 2), I32)}, r"weight_zero_point has .* \[2, 2\]"),
    ("int-8", {"m.weight_scale": None}, "weight_scale is missing"),
    ("int-8", {"m.weight": np.zeros((13, 37), np.uint8)}, "weight is of u8"),
    ("int-8", {"m.weight": np.zeros((13, 37), ml_dtypes.float8_e4m3fn)}, "fits 0"),
    ("fp8-block", {"m.weight_scale": np.zeros((3, 2), F16)}, "fits 0"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "message"), WRONG)
def test_what_does_not_fit_is_refused_by_name(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightError, match=f"DIR, tensors of 'm': .*{message}"):
        source(case, changes)


def test_codes_outside_of_their_bits_are_refused_when_they_are_read() -> None:
    weight = arrays("int-4")["m.weight"].copy()
    weight[12, 3] = 8
    found = source("int-4", {"m.weight": weight})
    found.rows("m.weight", 0, 12)
    with pytest.raises(WeightError, match=r"'m': it holds codes outside of -8\.\.7"):
        found.rows("m.weight", 12, 13)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
UNREAD: list[tuple[str, dict[str, Any], str]] = [
    ("gptq-4", {"quant_method": "hqq"}, r"hqq\): gptq, awq, compressed-tensors are read"),
    ("gptq-4", {"quant_method": ["gptq"]}, "gptq, awq"),
    ("gptq-4", {"checkpoint_format": "marlin"}, "its format is 'marlin'; gptq, gptq_v2 are read"),
    ("gptq-4", {"checkpoint_format": ["gptq"]}, "its format is"),
    ("gptq-4", {"is_marlin_format": True}, "gptq_v2 are read"),
    ("gptq-4", {"group_size": 0}, r"its group_size is \[0\]"),
    ("gptq-4", {"group_size": "32"}, "its group_size is"),
    ("awq", {"version": "gemv"}, "its version is 'gemv'; gemm is read"),
    ("awq", {"bits": 8}, "it has 8 bits"),
    ("awq", {"group_size": None}, "group_size None"),
    ("packed-4", {"format": "nvfp4-pack-quantized"}, "its format is 'nvfp4-pack-quantized'; pack-quantized"),
    ("packed-4", {"config_groups": {}}, "no config_groups"),
    ("packed-4", {"config_groups": {"a": ["Linear"]}}, "no config_groups"),
    ("packed-4", {"config_groups": {"a": GROUP | {"format": "marlin-24"}}}, "its format is 'marlin-24'"),
    ("packed-4", {"config_groups": {"a": GROUP | {"weights": [4]}}}, r"weights are \[4\]"),
    ("packed-4", {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}}, "'int' of 3 bits"),
    ("packed-4", {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "'float' of 4"),
    ("packed-4", {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}},
     "strategy 'group'"),
    ("packed-4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "message"), UNREAD)
def test_ways_that_are_not_read_are_refused(case: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=rf"DIR/config\.json: the checkpoint is quantised \(.*{message}"):
        source(case, config=config)
