"""GPTQ and round to nearest on matrices, against exact arithmetic in float64 and against each other."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.quantization.gptq import gptq, inverse_factor, output_error
from compiler.quantization.grid import Grid, Params, UnfitError
from compiler.quantization.rtn import round_to_nearest
from ir.ops.quantize import dequantize, round_weight
from ir.types import DType

GRIDS = [
    Grid(DType.U4, 32),
    Grid(DType.U4, 64, symmetric=False),
    Grid(DType.I8, 32),
    Grid(DType.I8, 0, scale=DType.F32),
    Grid(DType.F8E4M3, 0, scale=DType.F32),
]


def correlated(seed: int, inputs: int, tokens: int = 600) -> np.ndarray:
    """[tokens, inputs], of which a few directions carry most."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(inputs, inputs)) * np.geomspace(3, 0.05, inputs)[:, None]
    return (rng.normal(size=(tokens, inputs)) @ mix).astype(np.float32)


def hessian_of(x: np.ndarray) -> np.ndarray:
    return x.T @ x


def exact_error(w: np.ndarray, q: np.ndarray, x: np.ndarray) -> float:
    """Of the outputs, relative, in float64."""
    w, q, x = (a.astype(np.float64) for a in (w, q, x))
    return float(np.linalg.norm(x @ (w - q).T) / np.linalg.norm(x @ w.T))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g.dtype}-{g.group}-{g.symmetric}")
def test_gptq_has_less_error_on_correlated_inputs(grid: Grid) -> None:
    rng = np.random.default_rng(5)
    w, x = rng.normal(size=(24, 75)).astype(np.float32), correlated(6, 75)
    rounded = exact_error(w, round_to_nearest(w, grid).values(), x)
    fitted = exact_error(w, gptq(w, hessian_of(x), grid).values(), x)
    assert fitted < 0.7 * rounded


def test_a_matrix_of_one_row_is_left_as_it_is_and_rounded_as_beside_others() -> None:
    w, h = np.random.default_rng(4).normal(size=(1, 75)).astype(np.float32), hessian_of(correlated(6, 75))
    w.flags.writeable = False  # as a file's is
    found = gptq(w, h, GRIDS[1]).values()
    assert np.array_equal(found, gptq(np.repeat(w, 3, 0), h, GRIDS[1]).values()[:1])


def test_a_wrong_hessian_gains_nothing() -> None:
    rng = np.random.default_rng(7)
    w, x = rng.normal(size=(24, 64)).astype(np.float32), correlated(8, 64)
    rounded = exact_error(w, round_to_nearest(w, GRIDS[0]).values(), x)
    wrong = gptq(w, hessian_of(correlated(9, 64)), GRIDS[0])
    assert exact_error(w, wrong.values(), x) > rounded


def test_the_factor_is_the_inverses() -> None:
    h = hessian_of(correlated(1, 20)).astype(np.float64)
    damped = h + np.eye(20) * 0.01 * np.diag(h).mean()
    upper = inverse_factor(h, 0.01).astype(np.float64)
    assert np.array_equal(upper, np.triu(upper))
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(20), atol=1e-3)


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    w = np.random.default_rng(2).normal(size=(9, 40)).astype(np.float32)
    found = gptq(w, np.eye(40, dtype=np.float32), GRIDS[0])
    np.testing.assert_array_equal(found.codes, round_to_nearest(w, GRIDS[0]).codes)


@pytest.mark.parametrize("grid", GRIDS[:4], ids=lambda g: f"{g.dtype}-{g.group}-{g.symmetric}")
def test_searched_scales_are_never_worse(grid: Grid) -> None:
    w = np.random.default_rng(3).standard_t(4, size=(40, 70)).astype(np.float32)
    plain, searched = (round_to_nearest(w, grid, search=s).values() for s in (False, True))
    assert np.square(w - searched).sum() < np.square(w - plain).sum()


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g.dtype}-{g.group}-{g.symmetric}")
def test_without_a_search_it_is_the_op_quantize_weight(grid: Grid) -> None:
    w = np.random.default_rng(4).normal(size=(17, 83)).astype(np.float32)
    ours = round_to_nearest(w, grid, search=False)
    codes, scale, *offset = round_weight(w, grid.dtype, grid.group, grid.symmetric, grid.scale)
    zero = grid.zero if grid.symmetric else None
    theirs = dequantize(codes, scale, zero, offset[0] if offset else None, grid.group)
    np.testing.assert_array_equal(scale, ours.scale)
    assert np.mean(codes != ours.codes) < 0.01  # halves, by an inverse or by a division
    close = codes == ours.codes
    np.testing.assert_allclose(ours.values()[close], theirs[close], rtol=1e-6)


def test_an_error_of_outputs_is_that_of_the_text() -> None:
    rng = np.random.default_rng(10)
    w, x = rng.normal(size=(12, 30)).astype(np.float32), correlated(11, 30)
    q = (w + rng.normal(size=w.shape) * 0.1).astype(np.float32)
    assert output_error(w, q, hessian_of(x)) == pytest.approx(exact_error(w, q, x), rel=1e-3)


@pytest.mark.parametrize("algorithm", ["rtn", "gptq"])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g.dtype}-{g.group}-{g.symmetric}")
def test_zeros_and_constants_are_kept(grid: Grid, algorithm: str) -> None:
    w = np.random.default_rng(12).normal(size=(5, 70)).astype(np.float32)
    w[0], w[1, :32], w[2] = 0, 0, 0.75
    x = correlated(13, 70)
    x[:, 40] = 0  # an input that the text never sets
    found = round_to_nearest(w, grid) if algorithm == "rtn" else gptq(w, hessian_of(x), grid)
    assert np.isfinite(found.values()).all()
    np.testing.assert_array_equal(found.values()[0], 0)
    if grid.group == 32:
        np.testing.assert_array_equal(found.values()[1, :32], 0)
    if algorithm == "rtn":
        np.testing.assert_allclose(found.values()[2], 0.75, rtol=2e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    w = np.ones((4, 40), np.float32)
    w[3, 7] = bad
    with pytest.raises(UnfitError, match="1 of 160 weights"):
        round_to_nearest(w, GRIDS[0])
    with pytest.raises(UnfitError, match="1 of 160 weights"):
        gptq(w, np.eye(40), GRIDS[0])
    broken = np.eye(40)
    broken[2, 3] = bad
    with pytest.raises(UnfitError, match="calibration text are not finite"):
        gptq(np.ones((4, 40), np.float32), broken, GRIDS[0])


def test_scales_beyond_their_type_are_refused() -> None:
    with pytest.raises(UnfitError, match="scales beyond f16"):
        round_to_nearest(np.full((2, 32), 1e7, np.float32), GRIDS[0])


def test_a_hessian_of_one_token_is_damped_until_it_has_a_factor() -> None:
    w, x = np.random.default_rng(14).normal(size=(3, 50)).astype(np.float32), correlated(15, 50, tokens=1)
    assert np.isfinite(gptq(w, hessian_of(x), GRIDS[0], damping=0.0).values()).all()


@pytest.mark.parametrize(
    ("grid", "inputs", "bits"),
    [(GRIDS[0], 64, 4.5), (GRIDS[1], 64, 4.5), (GRIDS[2], 64, 8.5), (GRIDS[0], 40, 4.8)],
)
def test_bits_count_the_scales(grid: Grid, inputs: int, bits: float) -> None:
    assert grid.bits_per_weight(inputs) == pytest.approx(bits)


def test_codes_of_a_scale_of_zero_are_zero() -> None:
    params = Params(np.zeros(3, np.float32))
    np.testing.assert_array_equal(GRIDS[0].codes(np.ones((2, 3), np.float32), params), 0)
