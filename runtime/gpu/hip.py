"""AMD GPUs through HIP's driver calls, by ctypes: the first device that HIP_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import ctypes as c
import re
from typing import Any

from runtime.errors import EngineError
from runtime.gpu.vendor import Api, OutOfMemory, Unavailable, failure

LIBRARY = "libamdhip64.so"
OUT_OF_MEMORY = 2
NON_BLOCKING, THREAD_LOCAL = 1, 1
PROPERTIES_BYTES = 8192  # more than the structure has in any version

_P, _I, _U, _N = c.c_void_p, c.c_int, c.c_uint, c.c_size_t
# What is done: (HIP's name, types of the arguments, of the results, where the results stand among them).
_CALLS: dict[str, tuple[str, list[Any], list[Any], int]] = {
    "init": ("hipInit", [_U], [], 0),
    "count": ("hipGetDeviceCount", [], [_I], 0),
    "name": ("hipDeviceGetName", [_P, _I, _I], [], 0),
    "properties": ("hipGetDevicePropertiesR0600", [_P, _I], [], 0),
    "enter": ("hipSetDevice", [_I], [], 0),
    "stream": ("hipStreamCreateWithFlags", [_U], [_P], 0),
    "free_stream": ("hipStreamDestroy", [_P], [], 0),
    "synchronize": ("hipStreamSynchronize", [_P], [], 0),
    "allocate": ("hipMalloc", [_N], [_P], 0),
    "free": ("hipFree", [_P], [], 0),
    "memory": ("hipMemGetInfo", [], [_N, _N], 0),
    "allocate_host": ("hipHostMalloc", [_N, _U], [_P], 0),
    "free_host": ("hipHostFree", [_P], [], 0),
    "upload": ("hipMemcpyHtoDAsync", [_P, _P, _N, _P], [], 0),
    "download": ("hipMemcpyDtoHAsync", [_P, _P, _N, _P], [], 0),
    "copy": ("hipMemcpyDtoDAsync", [_P, _P, _N, _P], [], 0),
    "load_module": ("hipModuleLoadData", [c.c_char_p], [_P], 0),
    "unload_module": ("hipModuleUnload", [_P], [], 0),
    "function": ("hipModuleGetFunction", [_P, c.c_char_p], [_P], 0),
    "begin_capture": ("hipStreamBeginCapture", [_P, _I], [], 0),
    "end_capture": ("hipStreamEndCapture", [_P], [_P], 1),
    "instantiate": ("hipGraphInstantiateWithFlags", [_P, c.c_ulonglong], [_P], 0),
    "free_captured": ("hipGraphDestroy", [_P], [], 0),
    "replay": ("hipGraphLaunch", [_P, _P], [], 0),
    "free_graph": ("hipGraphExecDestroy", [_P], [], 0),
}
_LAUNCH = [_P, _U, _U, _U, _U, _U, _U, _U, _P, _P, _P]


class HipApi(Api):
    """See runtime.gpu.vendor.Api. library: libamdhip64. Raises Unavailable."""

    calls = {what: name for what, (name, *_) in _CALLS.items()}
    name = "HIP"

    def __init__(self, library: Any) -> None:
        self._library = library
        self._launch = library.hipModuleLaunchKernel
        self._launch.argtypes = _LAUNCH
        try:
            self._do("init", 0)
            count = self._do("count")
        except EngineError as error:
            raise Unavailable(error.what) from error
        if count == 0:
            raise Unavailable("its driver lists no GPU")
        text = c.create_string_buffer(256)
        self._do("name", c.addressof(text), 256, 0)
        self.name = text.value.decode(errors="replace")
        self.arch = self._architecture()
        self.warp_size = 64 if self.arch.startswith("gfx9") else 32

    @staticmethod
    def find() -> HipApi:
        """Raises Unavailable."""
        try:
            return HipApi(c.CDLL(LIBRARY))
        except OSError as error:
            raise Unavailable(f"{LIBRARY} was not found") from error

    def _architecture(self) -> str:
        """From the properties, whose layout differs from version to version: the name is the text in them
        that is an architecture's, such as gfx942:sramecc+:xnack-."""
        room = c.create_string_buffer(PROPERTIES_BYTES)
        self._do("properties", c.addressof(room), 0)
        found = re.search(rb"\0(gfx[0-9a-f]{3,5})[:\0]", room.raw[255:])
        if found is None:
            raise Unavailable(f"{self.name} does not say its architecture")
        return found[1].decode()

    def _do(self, what: str, *args: Any) -> Any:
        call, types, results, at = _CALLS[what]
        found = [kind() for kind in results]
        given = [kind(arg) for kind, arg in zip(types, args, strict=True)]
        given[at:at] = [c.byref(value) for value in found]
        code = getattr(self._library, call)(*given)
        if code:
            raise self._failure(call, code)
        values = [value.value for value in found]
        return values[0] if len(values) == 1 else values

    def _failure(self, call: str, code: int) -> Exception:
        if code == OUT_OF_MEMORY:
            return OutOfMemory(call)
        describe = self._library.hipGetErrorString
        describe.restype = c.c_char_p
        return failure(call, f"error {code}, {(describe(code) or b'unknown').decode()}", self.name)

    def open(self) -> None:
        self.enter()
        self._stream = self._do("stream", NON_BLOCKING)

    def enter(self) -> None:
        self._do("enter", 0)

    def close(self) -> None:
        self._do("free_stream", self._stream)

    def allow_shared(self, function: Any, num_bytes: int) -> None:
        """There is nothing to ask for: a kernel may use all that there is."""

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, params: int
    ) -> None:
        x, y, z = grid
        code = self._launch(function, x, y, z, threads, 1, 1, shared_bytes, self._stream, params, None)
        if code:
            raise self._failure("hipModuleLaunchKernel", code)

    @property
    def _capture_mode(self) -> Any:
        return THREAD_LOCAL
