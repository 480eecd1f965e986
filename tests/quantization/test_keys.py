"""The static shift and scale of keys: what they are, and that codes of eight bits gain by them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compiler.quantization.keys import MOST, key_scale
from compiler.quantization.options import Quantization
from tests.quantization.made import decision


def rounded(k: np.ndarray) -> np.ndarray:
    """Of int8 with a scale for each token [T, D]."""
    scale = np.abs(k).max(-1, keepdims=True) / 127
    return np.rint(k / scale) * scale


def test_scores_gain_by_a_shift_and_a_scale() -> None:
    rng = np.random.default_rng(0)
    size = np.geomspace(0.1, 4, 32)
    k = rng.normal(size=(400, 32)) * size + rng.normal(size=32) * 3
    q = rng.normal(size=(100, 32)) / size**0.5
    shift, scale = k.mean(0), key_scale((k.std(0))[None], np.sqrt(np.square(q).mean(0))[None])[0]
    plain = q @ (rounded(k) - k).T
    better = q @ ((rounded((k - shift) / scale) * scale + shift) - k).T
    assert np.square(better).mean() < np.square(plain).mean() / 4


def test_scales_are_bounded_and_finite() -> None:
    deviation = np.array([[0.0, 1e-12, 1.0, 1e9]])
    found = key_scale(deviation, np.array([[1.0, 1.0, 0.0, 1.0]]))
    assert np.isfinite(found).all() and (found > 0).all()
    assert found.max() / found.min() <= MOST**2 * (1 + 1e-6)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_calibration_finds_a_grid_for_each_layer(tmp_path: Path, kv: str) -> None:
    made = decision(tmp_path, Quantization(kv=kv))
    keys = made.first().keys
    writers = [op.loc for op in made.graph.ops if op.kind == "kv_write"]
    assert sorted(keys) == sorted(writers) and len(writers) == 2
    for grid in keys.values():
        scale, inverse = (made.store.read(w.name) for w in (grid.scale, grid.inverse))
        assert scale.shape == (2, 8)
        np.testing.assert_allclose(scale * inverse, 1, rtol=1e-6)
