"""Arrays that calibration makes: what was put is read, and a full disk is said in a line."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.quantization.store import Store
from ir.types import DType


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(DType.F16, np.float16), (DType.F8E4M3, ml_dtypes.float8_e4m3fn), (DType.U4, np.uint8)],
)
def test_what_is_put_is_read(tmp_path: Path, dtype: DType, kind: type) -> None:
    store, given = Store(tmp_path / "a"), np.random.default_rng(0).uniform(0, 15, (7, 5)).astype(kind)
    weight = store.put("w", given, dtype)
    assert weight.name == "w" and store.names == ("w",) and store.type("w").dtype is dtype
    np.testing.assert_array_equal(store.read("w"), given)
    np.testing.assert_array_equal(store.rows("w", 2, 4), given[2:4])


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "0.npy").symlink_to("/dev/full")
    with pytest.raises(CompileError, match=r"0\.npy: (no room for 400,000 bytes|No space left).* set TMPDIR"):
        Store(tmp_path).put("w", np.zeros(100_000, np.float32), DType.F32)
