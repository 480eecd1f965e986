"""A GPU through its vendor's driver: memory, modules, bound launches and graphs, given back at the end."""

from __future__ import annotations

import ctypes as c
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import EngineError, ResourceError
from runtime.gpu.device import Array, KernelSpec
from runtime.gpu.vendor import Api, OutOfMemory

STATIC_SHARED_BYTES = 48 << 10  # that a kernel may use without asking
_FORMATS = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q", "fp32": "f4x"}


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel, and where its launches' arguments are written to: drivers copy them as a launch starts.

    pack: a launch's arguments, eight bytes each: those of the signature in order, then two pointers to
    scratch memory, which are 0. params: the addresses of each.
    """

    spec: KernelSpec
    function: Any
    threads: int
    pack: struct.Struct
    values: c.Array[c.c_char]
    params: c.Array[c.c_void_p]

    @staticmethod
    def of(spec: KernelSpec, function: Any, threads: int) -> LoadedKernel:
        types = [type_ for _, type_ in spec.signature]
        pack = struct.Struct("<" + "".join("Q" if t.startswith("*") else _FORMATS[t] for t in types))
        values = c.create_string_buffer(pack.size + 16)
        places = [c.addressof(values) + 8 * i for i in range(len(types) + 2)]
        return LoadedKernel(spec, function, threads, pack, values, (c.c_void_p * len(places))(*places))


@dataclass(frozen=True, slots=True)
class Recorded:
    device: DriverDevice
    graph: Any

    def replay(self) -> None:
        self.device.enter()
        self.device.api.replay(self.graph)


class DriverDevice:
    """See runtime.gpu.device.Device."""

    def __init__(self, api: Api) -> None:
        api.open()
        self.api, self.name = api, api.name
        self._thread: int | None = None
        self._memory: dict[int, int] = {}  # address -> bytes
        self._host: set[int] = set()
        self._modules: list[Any] = []
        self._graphs: list[Any] = []
        self._closed = False

    def enter(self) -> None:
        thread = threading.get_ident()
        if thread != self._thread:
            self.api.enter()
            self._thread = thread

    def allocate(self, num_bytes: int, what: str) -> int:
        self.enter()
        try:
            address = self.api.allocate(max(num_bytes, 1))
        except OutOfMemory:
            raise _refused(num_bytes, what, self.name, self.free_memory()) from None
        self._memory[address] = num_bytes
        return address

    def free(self, address: int) -> None:
        self.enter()
        self.api.free(address)
        del self._memory[address]

    def free_memory(self) -> int:
        self.enter()
        return self.api.free_memory()

    def host_array(self, num_bytes: int) -> Array:
        self.enter()
        try:
            address = self.api.allocate_host(max(num_bytes, 1))
        except OutOfMemory:
            raise ResourceError(
                f"{num_bytes} bytes of pinned memory cannot be had",
                where="the host",
                todo="Free some of its memory",
            ) from None
        self._host.add(address)
        memory = memoryview((c.c_uint8 * max(num_bytes, 1)).from_address(address))
        return np.frombuffer(memory, np.uint8)[:num_bytes]

    def free_host(self, array: Array) -> None:
        self.enter()
        address = array.ctypes.data
        self._host.remove(address)
        self.api.free_host(address)

    def upload(self, address: int, source: Array) -> None:
        self.enter()
        self.api.upload(address, source.ctypes.data, source.nbytes)

    def download(self, target: Array, address: int) -> None:
        self.enter()
        self.api.download(target.ctypes.data, address, target.nbytes)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.enter()
        self.api.copy(target, source, num_bytes)

    def load(self, specs: Sequence[KernelSpec]) -> list[LoadedKernel]:
        self.enter()
        warp_size = self.api.warp_size
        return [LoadedKernel.of(spec, self._function(spec), spec.num_warps * warp_size) for spec in specs]

    def _function(self, spec: KernelSpec) -> Any:
        assert spec.binary is not None, f"{spec.name} has no binary"
        try:
            module = self.api.load_module(spec.binary)
            self._modules.append(module)
            function = self.api.function(module, spec.symbol)
            if spec.shared_bytes > STATIC_SHARED_BYTES:
                self.api.allow_shared(function, spec.shared_bytes)
        except EngineError as error:
            raise EngineError(error.what, where=f"kernel {spec.name}", todo=error.todo) from error
        return function

    def launch(self, kernel: LoadedKernel, grid: tuple[int, int, int], args: Sequence[int]) -> None:
        self.enter()
        kernel.pack.pack_into(kernel.values, 0, *args)
        params = c.addressof(kernel.params)
        self.api.launch(kernel.function, grid, kernel.threads, kernel.spec.shared_bytes, params)

    def record(self, work: Callable[[], None]) -> Recorded:
        self.enter()
        self.api.begin_capture()
        try:
            work()
        except BaseException:
            self.api.abort_capture()
            raise
        graph = self.api.end_capture()
        self._graphs.append(graph)
        return Recorded(self, graph)

    def synchronize(self) -> None:
        self.enter()
        self.api.synchronize()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        releases = [
            self.enter,
            self.api.synchronize,
            *(partial(self.api.free_graph, graph) for graph in self._graphs),
            *(partial(self.api.unload_module, module) for module in self._modules),
            *(partial(self.api.free, address) for address in self._memory),
            *(partial(self.api.free_host, address) for address in self._host),
            self.api.close,
        ]
        for release in releases:
            with suppress(EngineError):  # a device that has failed takes no more calls, and frees by itself
                release()


def _refused(num_bytes: int, what: str, name: str, free: int) -> ResourceError:
    return ResourceError(
        f"{num_bytes:,} bytes for {what} cannot be had: it has {free:,} bytes free",
        where=name,
        todo="Use smaller max_step_tokens, max_requests or kv_memory, or free memory",
    )
