"""What is put in the place of Triton's interpreter's own functions says of types and shapes what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from runtime.gpu.device import KernelSpec
from runtime.gpu.interpret import InterpretedDevice

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def outer(x, y, out, N: tl.constexpr, M: tl.constexpr):
    n, m = tl.arange(0, N), tl.arange(0, M)
    left, right = tl.load(x + n), tl.load(y + m)
    tl.store(out + n[:, None] * M + m[None, :], left[:, None] * right[None, :] + tl.program_id(0))
"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> InterpretedDevice:
    path = tmp_path_factory.mktemp("quick") / "kernels.py"
    path.write_text(SOURCE)
    return InterpretedDevice(path)


@pytest.mark.parametrize("shape", [[3], [4, 0], [4, 16.0], [2**21], []])
def test_what_is_no_shape_is_refused_though_one_equal_to_it_was_seen(
    device: InterpretedDevice, shape: list[Any]
) -> None:
    assert tl.block_type(tl.float32, [4, 16]).numel == 64
    with pytest.raises((TypeError, ValueError)):
        tl.block_type(tl.float32, shape)


def test_types_are_told_apart_by_elements_and_shapes(device: InterpretedDevice) -> None:
    of = lambda dtype, *shape: tl.block_type(dtype, list(shape))  # noqa: E731
    first = of(tl.float32, 16, 4)
    assert first == of(tl.float32, 16, 4)
    for other in (of(tl.int32, 16, 4), of(tl.float32, 4, 16), of(tl.float32, 64), tl.float32):
        assert first != other and str(first) != str(other)
    assert tl.float32 == tl.dtype("fp32") and tl.float32 != tl.int32
    pointers = of(tl.pointer_type(tl.float32), 16)
    for dtype, want in ((tl.float32, "f4"), (tl.bfloat16, "u2"), (tl.int1, "?"), (tl.float8e4nv, "u1")):
        assert interpreter._get_np_dtype(dtype) == interpreter._get_np_dtype(of(dtype, 2)) == np.dtype(want)
    assert interpreter._get_np_dtype(pointers) == np.uint64


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 8), (8, 1), (4, 4), (2, 8)])
def test_values_are_broadcast_as_numpy_broadcasts_them(device: InterpretedDevice, n: int, m: int) -> None:
    x, y = (np.random.default_rng().standard_normal(size).astype(np.float32) for size in (n, m))
    out = np.zeros((n, m), np.float32)
    signature = tuple((name, "*fp32") for name in ("x", "y", "out"))
    (kernel,) = device.load(
        [KernelSpec("outer", "outer", "outer", signature, (("N", n), ("M", m)), 1, 0, None)]
    )
    device.launch(kernel, (1, 1, 1), [a.ctypes.data for a in (x, y, out)])
    assert np.array_equal(out, x[:, None] * y[None, :])
