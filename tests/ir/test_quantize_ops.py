"""Quantised values against the definition, element by element; f8e4m3 against all of its values."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ir.ops import InferError
from ir.types import DType
from tests.ir.run import result, results

SHAPES = [(3, 1), (2, 15), (5, 16), (1, 17), (4, 64), (3, 97)]
SIZES = [0, 1, 7, 32]


def groups(width: int, size: int) -> list[slice]:
    step = size or width
    return [slice(at, min(at + step, width)) for at in range(0, width, step)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_dynamic_group_has_the_scale_of_its_largest_element(shape: tuple[int, int], size: int) -> None:
    x = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
    x[0] = 0
    codes, scale = results("quantize", x, dtype="i8", group_size=size)
    assert codes.dtype == np.int8 and scale.shape == (shape[0], len(groups(shape[1], size)))
    for row in range(shape[0]):
        for g, span in enumerate(groups(shape[1], size)):
            part = x[row, span].astype(np.float64)
            assert scale[row, g] == pytest.approx(abs(part).max() / 127, rel=1e-6)
            assert abs(part - codes[row, span] * float(scale[row, g])).max() <= 0.5001 * scale[row, g]
            assert abs(codes[row, span].astype(int)).max() == (127 if abs(part).max() else 0)
    back = result("dequantize", codes, scale, group_size=size)
    assert abs(back - x).max() <= 0.5001 * scale.max() and not back[0].any()


def test_values_of_f8e4m3_are_the_nearest() -> None:
    x = np.random.default_rng(0).normal(size=(7, 40)).astype(np.float32)
    codes, scale = results("quantize", x, dtype="f8e4m3", group_size=0)
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    values = values[np.isfinite(values)]
    assert values.max() == 448 and np.abs(values[values != 0]).min() == 2.0**-9
    scaled = x.astype(np.float64) / scale.astype(np.float64)
    nearest = np.abs(scaled[..., None] - values).min(-1)
    assert np.abs(codes.astype(np.float64) - scaled).max() <= 16
    np.testing.assert_allclose(np.abs(codes.astype(np.float64) - scaled), nearest, atol=3e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_stays_so_and_touches_no_other(bad: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    codes, scale = results("quantize", x, dtype="i8", group_size=32)
    back = result("dequantize", codes, scale, group_size=32)
    assert (
        np.isfinite(back[0]).all() and np.isfinite(back[1, :32]).all() and not np.isfinite(back[1, 32:]).any()
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [0, 7, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_rounded_to_the_nearest_of_sixteen(
    shape: tuple[int, int], size: int, symmetric: bool
) -> None:
    w = np.random.default_rng(size).normal(size=shape).astype(np.float32)
    w[0, :3] = 0.25
    codes, scale, *offset = results("quantize_weight", w, dtype="u4", group_size=size, symmetric=symmetric)
    assert scale.dtype == np.float16 and len(offset) == (not symmetric) and codes.max() <= 15
    for row in range(shape[0]):
        for g, span in enumerate(groups(shape[1], size)):
            step = float(scale[row, g])
            low = float(offset[0][row, g]) if offset else -8 * step
            grid = low + step * np.arange(16)
            nearest = np.abs(w[row, span, None] - grid).min(-1)
            found = np.abs(w[row, span] - (low + step * codes[row, span]))
            np.testing.assert_allclose(found, nearest, atol=1e-6)
            assert found.max() <= 1.001 * abs(step) + 2e-3 * abs(low)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or an infinity"):
        results("quantize_weight", np.full((2, 4), bad, np.float32), dtype="i8", group_size=0)


def written_out(codes: Any, scale: Any, zero: Any, offset: Any, size: int) -> Any:
    out = np.zeros(codes.shape)
    for n, k in np.ndindex(codes.shape):
        g = k // (size or codes.shape[1])
        z = zero if isinstance(zero, int) else int(zero[n, g])
        out[n, k] = (float(codes[n, k]) - z) * float(scale[n, g])
        out[n, k] += float(offset[n, g]) if offset is not None else 0.0
    return out


@pytest.mark.parametrize("parts", ["scale", "zero", "zeros", "offset"])
@pytest.mark.parametrize("size", [0, 5, 16])
def test_dequantised_linears_and_rows(parts: str, size: int) -> None:
    rng = np.random.default_rng(size)
    n, k = 6, 17
    shape = (n, len(groups(k, size)))
    codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scale, offset = rng.normal(size=(2, *shape)).astype(np.float32)
    zeros = rng.integers(0, 16, shape).astype(np.uint8)
    zero = 8 if parts == "zero" else 0
    given = {"zeros": (zeros,), "offset": (None, offset)}.get(parts, ())
    full = written_out(codes, scale, zeros if parts == "zeros" else zero, offset if given[1:] else None, size)
    attrs: dict[str, Any] = {"group_size": size, "zero": zero}
    np.testing.assert_allclose(
        result("dequantize", codes, scale, *given, **attrs), full, rtol=1e-5, atol=1e-5
    )
    ids = np.array([5, 0, 5], np.int32)
    np.testing.assert_allclose(
        result("qembed", ids, codes, scale, *given, **attrs), full[ids], rtol=1e-5, atol=1e-5
    )
    x, bias, residual = rng.normal(size=(4, k)), rng.normal(size=n), rng.normal(size=(4, n))
    rest = (*given, *(None,) * (2 - len(given)), bias, residual)
    found = result(
        "qlinear", x, codes, scale.astype(np.float64), *rest, wide=True, activation="relu", **attrs
    )
    np.testing.assert_allclose(found, np.maximum(x @ full.T + bias, 0) + residual, rtol=1e-5, atol=1e-5)


def test_what_a_linear_of_codes_reads_is_rounded_per_token() -> None:
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=(3, 40)), rng.integers(-127, 128, (6, 40)).astype(np.int8)
    scale = rng.random((6, 2))
    rounded, steps = results("quantize", x, dtype="i8", group_size=16, wide=True)
    y = result("dequantize", rounded, steps, group_size=16, wide=True)
    found = result("qlinear", x, codes, scale, wide=True, group_size=32, x_dtype="i8", x_group_size=16)
    full = written_out(codes, scale, 0, None, 32)
    np.testing.assert_allclose(found, y @ full.T, rtol=1e-10)
    assert np.abs(found - x @ full.T).max() > 1e-4


CODES, SCALE = np.zeros((4, 33), np.uint8), np.ones((4, 2), np.float32)
REFUSED = [
    ((CODES.astype(np.float32), SCALE), {"group_size": 32}, "codes are f32"),
    ((CODES, SCALE[:, :1]), {"group_size": 32}, r"scale is \[4, 1\], not \[4, 2\]"),
    ((CODES, SCALE.astype(np.int32)), {"group_size": 32}, "must be float tensors"),
    ((CODES, SCALE, SCALE), {"group_size": 32}, "zero must be integers"),
    ((CODES, SCALE), {"group_size": -1}, "from 0"),
    ((CODES.view(ml_dtypes.float8_e4m3fn), SCALE), {"group_size": 32, "zero": 8}, "have no zero"),
]


@pytest.mark.parametrize(("operands", "attrs", "message"), REFUSED)
def test_refuses(operands: tuple[Any, ...], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=message):
        result("dequantize", *operands, **attrs)


def test_packed_types_have_no_bytes_of_their_own() -> None:
    assert (DType.U4.bits, DType.U2.bits, DType.F8E4M3.bits, DType.BF16.bits) == (4, 2, 8, 16)
    with pytest.raises(ValueError, match="share bytes"):
        _ = DType.U4.size_bytes
