"""Bandwidth of a plain read with numpy."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np


class Reader:
    """Reads a buffer of so many bytes with so many threads."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self._parts = np.array_split(np.ones(num_bytes // 4, np.float32), num_threads)
        self._pool = ThreadPoolExecutor(num_threads)
        self._num_bytes = num_bytes

    def bandwidth(self) -> float:
        """Bytes per second: the median of five reads."""
        return self._num_bytes / median(self._read() for _ in range(5))

    def _read(self) -> float:
        start = time.perf_counter()
        list(self._pool.map(np.max, self._parts))
        return time.perf_counter() - start
