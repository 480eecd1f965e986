"""The driver calls that a device needs: what CUDA and HIP have in common.

Both have the same calls under other names. Every result is checked; an error names the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from runtime.errors import EngineError


class Unavailable(Exception):
    """There is no such GPU here. The message says what was found."""


class OutOfMemory(Exception):
    """What a driver says where an allocation does not fit."""


class Api(ABC):
    """One device of a vendor. Nothing is held before open().

    calls: the vendor's names of what is done. name: of the device. arch: as targets spell it. shared_bytes:
    the most shared memory that a block may take; None where only the device's own binaries run anyway.
    """

    calls: Mapping[str, str]
    warp_size: int
    name: str
    arch: str
    shared_bytes: int | None = None
    _stream: Any

    @abstractmethod
    def _do(self, what: str, *args: Any) -> Any:
        """Make a call of `calls`, and return what it gives: nothing, a value, or several."""

    @abstractmethod
    def open(self) -> None:
        """Take a context and a stream."""

    @abstractmethod
    def enter(self) -> None:
        """Make the device the calling thread's."""

    @abstractmethod
    def close(self) -> None:
        """Give back what open() took."""

    @abstractmethod
    def allow_shared(self, function: Any, num_bytes: int) -> None:
        """Let a kernel use more shared memory than one may without asking."""

    @abstractmethod
    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, params: int
    ) -> None:
        """Start a kernel. params: the address of an array of the arguments' addresses; all is copied."""

    def allocate(self, num_bytes: int) -> int:
        """Raises OutOfMemory."""
        return int(self._do("allocate", num_bytes))

    def free(self, address: int) -> None:
        self._do("free", address)

    def free_memory(self) -> int:
        return int(self._do("memory")[0])

    def allocate_host(self, num_bytes: int) -> int:
        """Pinned memory. Raises OutOfMemory."""
        return int(self._do("allocate_host", num_bytes, 0))

    def free_host(self, address: int) -> None:
        self._do("free_host", address)

    def upload(self, target: int, source: int, num_bytes: int) -> None:
        self._do("upload", target, source, num_bytes, self._stream)

    def download(self, target: int, source: int, num_bytes: int) -> None:
        self._do("download", target, source, num_bytes, self._stream)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._do("copy", target, source, num_bytes, self._stream)

    def load_module(self, binary: bytes) -> Any:
        return self._do("load_module", binary)

    def unload_module(self, module: Any) -> None:
        self._do("unload_module", module)

    def function(self, module: Any, symbol: str) -> Any:
        return self._do("function", module, symbol.encode())

    def begin_capture(self) -> None:
        self._do("begin_capture", self._stream, self._capture_mode)

    def end_capture(self) -> Any:
        """The executable graph of what was started since."""
        graph = self._do("end_capture", self._stream)
        try:
            return self._do("instantiate", graph, 0)
        finally:
            self._do("free_captured", graph)

    def abort_capture(self) -> None:
        """End a capture in which something failed. Errors of its own are left out: what failed says more."""
        with suppress(EngineError, OutOfMemory):
            graph = self._do("end_capture", self._stream)
            if graph:  # none where the failure made the capture invalid
                self._do("free_captured", graph)

    def replay(self, graph: Any) -> None:
        self._do("replay", graph, self._stream)

    def free_graph(self, graph: Any) -> None:
        self._do("free_graph", graph)

    def synchronize(self) -> None:
        self._do("synchronize", self._stream)

    @property
    @abstractmethod
    def _capture_mode(self) -> Any:
        """Only what the capturing thread starts is captured, and only it is restricted."""


def failure(call: str, said: str, device: str) -> EngineError:
    return EngineError(
        f"{call} failed: {said}",
        where=device,
        todo="Load the artifact again; if it persists, report it with the request that caused it",
    )
