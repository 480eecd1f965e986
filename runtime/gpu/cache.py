"""One KV group's blocks in device memory, and those that were swapped to the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from runtime.errors import EngineError
from runtime.gpu.device import Array, Device


class BlockPool:
    """swap_blocks: how many blocks the host has room for."""

    def __init__(self, device: Device, num_blocks: int, block_bytes: int, swap_blocks: int = 0) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._counts = num_blocks, swap_blocks
        self.address = device.allocate(num_blocks * block_bytes, "the KV cache")
        self._host: Array | None = device.host_array(swap_blocks * block_bytes) if swap_blocks else None

    def copy(self, pairs: np.ndarray) -> None:
        """Start copies from block to block; pairs: i32 [n, 2]."""
        for source, target in self._checked(pairs, 0, 0):
            self._device.copy(self._at(target), self._at(source), self._block_bytes)

    def swap_out(self, pairs: np.ndarray) -> None:
        """Start copies from blocks to places on the host; pairs: i32 [n, 2]."""
        for block, place in self._checked(pairs, 0, 1):
            self._device.download(self._held(place), self._at(block))

    def swap_in(self, pairs: np.ndarray) -> None:
        """Start copies from places on the host to blocks; pairs: i32 [n, 2]."""
        for place, block in self._checked(pairs, 1, 0):
            self._device.upload(self._at(block), self._held(place))

    def _checked(self, pairs: np.ndarray, first: int, second: int) -> Iterator[tuple[int, int]]:
        """The pairs. first, second: where each number belongs, 0 on the device and 1 on the host."""
        most = self._counts[first], self._counts[second]
        if len(pairs) and ((pairs < 0) | (pairs >= most)).any():
            raise EngineError(
                f"there are {self._counts[0]} blocks on the device and {self._counts[1]} on the host",
                where="KV cache",
                todo="Report it",
            )
        return ((a, b) for a, b in pairs.tolist())

    def _at(self, block: int) -> int:
        return self.address + block * self._block_bytes

    def _held(self, place: int) -> Array:
        assert self._host is not None
        return self._host[place * self._block_bytes : (place + 1) * self._block_bytes]
