"""Rounding to bf16 in the interpreter against a library's."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from runtime.gpu.bf16 import rounded

EDGES = [0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0, 0x80000000, 0x3F808000, 0x3F818000, 1]


def test_values_round_to_the_nearest_even():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = np.concatenate([bits, np.array(EDGES, np.uint32)]).view(np.float32)
    numbers, found = ~np.isnan(values), rounded(values)
    np.testing.assert_array_equal(found[numbers], values[numbers].astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(found.view(ml_dtypes.bfloat16).astype(np.float32)).tolist() == (~numbers).tolist()
    assert rounded(values[:6].reshape(3, 2)).shape == (3, 2) and rounded(values[0]).shape == ()
