"""What the machine does at best, by loops in an artifact's own library, and how long costs then take."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from runtime.artifact import Artifact

MAX_BUFFER_BYTES = 1 << 30  # far beyond every cache


@dataclass(frozen=True)
class Limits:
    """Rates of all threads together, 0 where the kernel's level has no such instruction.

    i8_ops_per_s, u4_ops_per_s: of products of 8-bit x and codes; 0 in artifacts from before there were any.
    """

    read_bytes_per_s: float
    f32_ops_per_s: float
    bf16_ops_per_s: float
    i8_ops_per_s: float
    u4_ops_per_s: float

    @staticmethod
    def median(measured: Sequence[Limits]) -> Limits:
        columns = zip(*(asdict(each).values() for each in measured), strict=True)
        return Limits(*map(statistics.median, columns))

    def read_s(self, num_bytes: float) -> float:
        return num_bytes / self.read_bytes_per_s

    def compute_s(self, operations: float, dtype: str) -> float:
        """dtype: of the products. What has no instruction of its own is computed in f32."""
        peaks = {"bf16": self.bf16_ops_per_s, "i8": self.i8_ops_per_s, "u4": self.u4_ops_per_s}
        return operations / (peaks.get(dtype) or self.f32_ops_per_s)


class Product(Protocol):
    """Operations and the type that they are done in."""

    @property
    def operations(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def products_s(limits: Limits, products: Sequence[Product]) -> float:
    """What the arithmetic of a step takes at least."""
    return sum(limits.compute_s(p.operations, p.dtype) for p in products)


class _Limits(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in Limits.__dataclass_fields__]


class Probe:
    """Measures the machine at a kernel's ISA level, reading a buffer of the weights' size (at most 1 GiB)."""

    def __init__(self, artifact: Artifact, threads: int, isa: str | None = None) -> None:
        weight_bytes = artifact.manifest.files[artifact.weights()].bytes
        self._threads = threads
        self._buffer = np.ones(min(weight_bytes, MAX_BUFFER_BYTES), np.uint8)
        self._measure = ctypes.CDLL(str(artifact.path(artifact.kernel(isa).file))).octavo_measure
        self._measure.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._measure.restype = None

    def measure(self) -> Limits:
        """One plain read and the loops of arithmetic: some tens of milliseconds."""
        found = _Limits()
        self._measure(self._threads, self._buffer.ctypes.data, self._buffer.nbytes, ctypes.addressof(found))
        return Limits(*(getattr(found, name) for name in Limits.__dataclass_fields__))
