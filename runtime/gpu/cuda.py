"""NVIDIA GPUs through the driver API, by cuda-bindings: the first device that CUDA_VISIBLE_DEVICES leaves."""

from __future__ import annotations

import ctypes as c
import importlib
from typing import Any

from runtime.errors import EngineError
from runtime.gpu.vendor import Api, OutOfMemory, Unavailable, failure

LIBRARY = "libcuda.so.1"


class CudaApi(Api):
    """See runtime.gpu.vendor.Api. driver: the module cuda.bindings.driver. Raises Unavailable."""

    calls = {
        "init": "cuInit", "count": "cuDeviceGetCount", "device": "cuDeviceGet", "name": "cuDeviceGetName",
        "attribute": "cuDeviceGetAttribute",
        "context": "cuDevicePrimaryCtxRetain", "enter": "cuCtxSetCurrent",
        "leave": "cuDevicePrimaryCtxRelease",
        "stream": "cuStreamCreate", "free_stream": "cuStreamDestroy", "synchronize": "cuStreamSynchronize",
        "allocate": "cuMemAlloc", "free": "cuMemFree", "memory": "cuMemGetInfo",
        "allocate_host": "cuMemHostAlloc", "free_host": "cuMemFreeHost",
        "upload": "cuMemcpyHtoDAsync", "download": "cuMemcpyDtoHAsync", "copy": "cuMemcpyDtoDAsync",
        "load_module": "cuModuleLoadData", "unload_module": "cuModuleUnload",
        "function": "cuModuleGetFunction",
        "set": "cuFuncSetAttribute",
        "begin_capture": "cuStreamBeginCapture", "end_capture": "cuStreamEndCapture",
        "instantiate": "cuGraphInstantiate", "free_captured": "cuGraphDestroy",
        "replay": "cuGraphLaunch", "free_graph": "cuGraphExecDestroy",
    }  # fmt: skip
    warp_size = 32
    name = "CUDA"

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        try:
            self._do("init", 0)
            count = self._do("count")
        except RuntimeError as error:  # of cuda-bindings, where it cannot use the driver's library
            raise Unavailable(f"{LIBRARY} cannot be used ({error})") from error
        except EngineError as error:
            raise Unavailable(error.what) from error
        if count == 0:
            raise Unavailable("its driver lists no GPU")
        self._device = self._do("device", 0)
        self.name = _text(self._do("name", 256, self._device))
        major, minor = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.arch = f"sm_{major}{minor}"
        self.shared_bytes = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    @staticmethod
    def find() -> CudaApi:
        """Raises Unavailable."""
        try:
            c.CDLL(LIBRARY)
        except OSError as error:
            raise Unavailable(f"{LIBRARY} was not found") from error
        try:
            driver = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            missing = "the package cuda-bindings is not installed (pip install 'octavo[cuda]')"
            raise Unavailable(missing) from error
        return CudaApi(driver)

    def _attribute(self, name: str) -> int:
        kind = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._do("attribute", kind, self._device))

    def _do(self, what: str, *args: Any) -> Any:
        call = self.calls[what]
        code, *results = getattr(self._driver, call)(*args)
        if code:
            raise self._failure(call, code)
        return results[0] if len(results) == 1 else results

    def _failure(self, call: str, code: Any) -> Exception:
        if code == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            return OutOfMemory(call)
        _, text = self._driver.cuGetErrorString(code)
        return failure(call, f"{getattr(code, 'name', code)}, {_text(text or b'unknown')}", self.name)

    def open(self) -> None:
        self._context = self._do("context", self._device)
        self.enter()
        self._stream = self._do("stream", self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def enter(self) -> None:
        self._do("enter", self._context)

    def close(self) -> None:
        self._do("free_stream", self._stream)
        self._do("leave", self._device)

    def allow_shared(self, function: Any, num_bytes: int) -> None:
        kinds = self._driver.CUfunction_attribute
        self._do("set", function, kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, num_bytes)

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, params: int
    ) -> None:
        x, y, z = grid
        (code,) = self._driver.cuLaunchKernel(
            function, x, y, z, threads, 1, 1, shared_bytes, self._stream, params, 0
        )
        if code:
            raise self._failure("cuLaunchKernel", code)

    @property
    def _capture_mode(self) -> Any:
        return self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode(errors="replace")
