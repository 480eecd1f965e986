"""What an executor needs of a device: memory, kernels and one stream of work, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel of kernels.json. binary: None where the device takes source (the interpreter).

    signature: (parameter, type) of what a launch passes. constants: of the rest.
    """

    name: str
    function: str
    symbol: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int | float | str], ...]
    num_warps: int
    shared_bytes: int
    binary: bytes | None


class Graph(Protocol):
    """Launches that were recorded once and are replayed as one."""

    def replay(self) -> None:
        """Start them all. They read what their arrays hold by then."""
        ...


class Device(Protocol):
    """Used by one thread at a time. Addresses are the device's; all work is done in the order it was given,
    and what is only started may fail in a later call.

    Methods raise ResourceError where memory runs out and EngineError where the device fails.
    """

    name: str  # what the device calls itself

    def allocate(self, num_bytes: int, what: str) -> int:
        """An address, aligned to 256 bytes. The content is undefined."""
        ...

    def free(self, address: int) -> None: ...

    def free_memory(self) -> int:
        """Bytes that allocate() could still give."""
        ...

    def host_array(self, num_bytes: int) -> Array:
        """Host memory (u8) that copies need not stage: pinned where there is such."""
        ...

    def free_host(self, array: Array) -> None:
        """Give back what host_array() gave, itself or a view of all of it."""
        ...

    def upload(self, address: int, source: Array) -> None:
        """Start a copy from the host; `source` must stay as it is until synchronize()."""
        ...

    def download(self, target: Array, address: int) -> None:
        """Start a copy to the host; it is there after synchronize()."""
        ...

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Start a copy within the device."""
        ...

    def load(self, specs: Sequence[KernelSpec]) -> list[Any]:
        """A handle of each kernel, for launch()."""
        ...

    def launch(self, kernel: Any, grid: tuple[int, int, int], args: Sequence[int]) -> None:
        """Start a kernel. args: addresses and numbers, in the order of its signature."""
        ...

    def record(self, work: Callable[[], None]) -> Graph:
        """Record what `work` launches and copies, without running it."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None:
        """Give back everything."""
        ...
