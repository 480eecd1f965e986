"""The drivers' calls without a GPU: a recording stub in the place of cuda.bindings.driver, and one of HIP's
library. What a GPU does with them needs one to test.
"""

from __future__ import annotations

import ctypes as c
import struct
import threading
from dataclasses import replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import EngineError, ResourceError
from runtime.gpu.cuda import CudaApi
from runtime.gpu.device import KernelSpec
from runtime.gpu.driver import DriverDevice
from runtime.gpu.hip import HipApi
from runtime.gpu.vendor import Unavailable


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


SPEC = KernelSpec(
    "linear.0", "linear", "linear_sym",
    (("x", "*bf16"), ("rows", "i32"), ("scale", "fp32"), ("seed", "u64"), ("at", "i64"), ("mask", "u32")),
    (("BLOCK", 16),), 4, 0, b"\x7fELF\0cubin",
)  # fmt: skip
ARGS = [0x7F00_1234_5678, -3, 0.5, 2**63 + 1, -(2**40), 2**32 - 1]
PACKED = struct.pack("<Qi4xf4xQqI4xQQ", *ARGS, 0, 0)


class CudaStub:
    """Records calls as (name, arguments). fails: name -> code. Pinned and device memory is the host's."""

    CUresult = Code
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=97,
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, count: int = 1) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.launched: list[bytes] = []
        self.fails: dict[str, Code] = {}
        self.gives: dict[str, Any] = {
            "cuDeviceGetCount": count, "cuDeviceGet": 0, "cuDeviceGetName": b"H100\0\0\0",
            "cuMemGetInfo": (80, 99),
            "cuDevicePrimaryCtxRetain": "context", "cuStreamCreate": "stream", "cuModuleLoadData": "module",
            "cuModuleGetFunction": "function", "cuStreamEndCapture": "graph", "cuGraphInstantiate": "exec",
        }  # fmt: skip
        self.held: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self._call(name, args)

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuGetErrorString":
            return Code.CUDA_SUCCESS, b"in words"
        self.calls.append((name, args))
        if name in self.fails:
            return (self.fails[name], None)[: 1 if name == "cuLaunchKernel" else 2]
        if name == "cuDeviceGetAttribute":
            return Code.CUDA_SUCCESS, {75: 9, 76: 0, 97: 227 << 10}[args[0]]
        if name in ("cuMemAlloc", "cuMemHostAlloc"):
            self.held.append(c.create_string_buffer(args[0]))
            return Code.CUDA_SUCCESS, c.addressof(self.held[-1])
        if name == "cuLaunchKernel":
            pointers = (c.c_void_p * (len(PACKED) // 8)).from_address(args[9])
            self.launched.append(b"".join(c.string_at(p, 8) for p in pointers))
        given = self.gives.get(name, ())
        return (Code.CUDA_SUCCESS, *(given if isinstance(given, tuple) else (given,)))

    def names(self) -> list[str]:
        found = [name for name, _ in self.calls if name != "cuCtxSetCurrent"]
        self.calls.clear()
        return found


@pytest.fixture
def stub() -> CudaStub:
    return CudaStub()


@pytest.fixture
def device(stub: CudaStub) -> DriverDevice:
    found = DriverDevice(CudaApi(stub))
    stub.calls.clear()
    return found


def test_a_device_is_opened_with_a_context_and_a_stream(stub):
    api = CudaApi(stub)
    assert (api.name, api.arch, api.shared_bytes) == ("H100", "sm_90", 227 << 10)
    assert "cuDevicePrimaryCtxRetain" not in stub.names()  # nothing is held until it is opened
    DriverDevice(api)
    assert stub.calls == [
        ("cuDevicePrimaryCtxRetain", (0,)),
        ("cuCtxSetCurrent", ("context",)),
        ("cuStreamCreate", (1,)),
    ]


def test_a_launch_packs_its_arguments_in_the_signatures_order(stub, device):
    (kernel,) = device.load([SPEC])
    load, find = stub.calls[1:]
    assert load == ("cuModuleLoadData", (SPEC.binary,))
    assert find == ("cuModuleGetFunction", ("module", b"linear_sym"))
    stub.calls.clear()
    others = [8 if isinstance(arg, int) else 1.5 for arg in ARGS]
    for args in (ARGS, others):
        device.launch(kernel, (7, 5, 3), args)
    for name, args in stub.calls:
        assert name == "cuLaunchKernel"
        assert (*args[:9], args[10]) == ("function", 7, 5, 3, 128, 1, 1, 0, "stream", 0)
    assert stub.launched == [PACKED, struct.pack("<Qi4xf4xQqI4xQQ", *others, 0, 0)]


@pytest.mark.parametrize(
    ("shared", "asks"), [(0, False), (48 << 10, False), ((48 << 10) + 1, True), (200_000, True)]
)
def test_more_shared_memory_is_asked_for(stub, device, shared, asks):
    (kernel,) = device.load([replace(SPEC, shared_bytes=shared)])
    asked = [args for name, args in stub.calls if name == "cuFuncSetAttribute"]
    assert asked == ([("function", 8, shared)] if asks else [])
    device.launch(kernel, (1, 1, 1), ARGS)
    assert stub.calls[-1][1][7] == shared


def test_copies_are_asynchronous_and_on_the_stream(stub, device):
    address = device.allocate(64, "data")
    pinned = device.host_array(32)
    pinned[:] = 7
    device.upload(address, pinned)
    device.download(pinned[:8], address + 16)
    device.copy(address, address + 32, 24)
    device.synchronize()
    at = pinned.ctypes.data
    assert [call for call in stub.calls if call[0] != "cuCtxSetCurrent"] == [
        ("cuMemAlloc", (64,)),
        ("cuMemHostAlloc", (32, 0)),
        ("cuMemcpyHtoDAsync", (address, at, 32, "stream")),
        ("cuMemcpyDtoHAsync", (at, address + 16, 8, "stream")),
        ("cuMemcpyDtoDAsync", (address, address + 32, 24, "stream")),
        ("cuStreamSynchronize", ("stream",)),
    ]


def test_launches_are_captured_and_replayed_as_one(stub, device):
    (kernel,) = device.load([SPEC])
    stub.calls.clear()
    graph = device.record(lambda: [device.launch(kernel, (1, 1, 1), ARGS) for _ in range(3)] and None)
    captured = ["cuStreamBeginCapture", *["cuLaunchKernel"] * 3, "cuStreamEndCapture"]
    assert stub.names() == [*captured, "cuGraphInstantiate", "cuGraphDestroy"]
    graph.replay()
    graph.replay()
    assert stub.calls == [("cuGraphLaunch", ("exec", "stream"))] * 2


@pytest.mark.parametrize("invalid", [False, True])
def test_a_failed_capture_is_ended_and_destroyed(stub, device, invalid):
    (kernel,) = device.load([SPEC])
    stub.fails["cuLaunchKernel"] = Code.CUDA_ERROR_ILLEGAL_ADDRESS
    if invalid:
        stub.fails["cuStreamEndCapture"] = Code.CUDA_ERROR_NO_DEVICE
    stub.calls.clear()
    with pytest.raises(EngineError, match="cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS, in words"):
        device.record(lambda: device.launch(kernel, (1, 1, 1), ARGS))
    ended = ["cuStreamEndCapture"] if invalid else ["cuStreamEndCapture", "cuGraphDestroy"]
    assert stub.names() == ["cuStreamBeginCapture", "cuLaunchKernel", *ended]


def test_a_thread_enters_the_context_once(stub, device):
    def work() -> None:
        for _ in range(3):
            device.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [name for name, _ in stub.calls] == ["cuCtxSetCurrent", *["cuStreamSynchronize"] * 3]


def test_everything_is_given_back(stub, device):
    (kernel,) = device.load([SPEC])
    graph = device.record(lambda: device.launch(kernel, (1, 1, 1), ARGS))
    graph.replay()
    kept, freed = device.allocate(64, "data"), device.allocate(64, "data")
    device.free(freed)
    host, gone = device.host_array(64), device.host_array(64)
    device.free_host(gone.reshape(2, 32))
    stub.calls.clear()
    device.close()
    device.close()
    assert [call for call in stub.calls if call[0] != "cuCtxSetCurrent"] == [
        ("cuStreamSynchronize", ("stream",)),
        ("cuGraphExecDestroy", ("exec",)),
        ("cuModuleUnload", ("module",)),
        ("cuMemFree", (kept,)),
        ("cuMemFreeHost", (host.ctypes.data,)),
        ("cuStreamDestroy", ("stream",)),
        ("cuDevicePrimaryCtxRelease", (0,)),
    ]


def test_a_device_that_failed_is_still_closed(stub, device):
    device.allocate(64, "data")
    stub.fails = dict.fromkeys(("cuStreamSynchronize", "cuMemFree"), Code.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(
        EngineError, match="H100: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS, in words"
    ):
        device.synchronize()
    device.close()
    assert stub.calls[-1][0] == "cuDevicePrimaryCtxRelease"


def test_a_kernel_that_cannot_be_loaded_is_named(stub, device):
    stub.fails["cuModuleLoadData"] = Code.CUDA_ERROR_NO_DEVICE
    with pytest.raises(EngineError, match="kernel linear.0: cuModuleLoadData failed"):
        device.load([SPEC])


def test_memory_that_does_not_fit_is_refused_with_the_numbers(stub, device):
    stub.fails = dict.fromkeys(("cuMemAlloc", "cuMemHostAlloc"), Code.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(
        ResourceError, match="H100: 1,000 bytes for the arena cannot be had: it has 80 bytes free"
    ):
        device.allocate(1000, "the arena")
    with pytest.raises(ResourceError, match="the host: 1000 bytes of pinned memory"):
        device.host_array(1000)


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda s: s.gives.update(cuDeviceGetCount=0), "lists no GPU"),
        (lambda s: s.fails.update(cuInit=Code.CUDA_ERROR_NO_DEVICE), "cuInit failed: CUDA_ERROR_NO_DEVICE"),
        (lambda s: setattr(s, "cuInit", _raise), "libcuda.so.1 cannot be used .no such library"),
    ],
)
def test_what_is_missing_is_said(stub, prepare, said):
    prepare(stub)
    with pytest.raises(Unavailable, match=said):
        CudaApi(stub)


def _raise(*_: Any) -> None:
    raise RuntimeError("no such library")


def test_the_stub_has_what_the_bindings_have():
    """Names and constants are those of the real module, which needs no driver to be imported."""
    driver = pytest.importorskip("cuda.bindings.driver")
    for name in [*CudaApi.calls.values(), "cuLaunchKernel", "cuGetErrorString"]:
        assert callable(getattr(driver, name))
    for holder in ("CUdevice_attribute", "CUfunction_attribute", "CUstream_flags", "CUstreamCaptureMode"):
        for name, value in vars(getattr(CudaStub, holder)).items():
            assert getattr(getattr(driver, holder), name) == value
    for code in Code:
        assert getattr(driver.CUresult, code.name) == code
    assert not driver.CUresult.CUDA_SUCCESS and driver.CUresult.CUDA_ERROR_NO_DEVICE


# --- HIP


class HipStub:
    """libamdhip64's functions by ctypes' rules: results through pointers, and a code."""

    def __init__(self, properties: bytes = b"AMD\0".ljust(1160, b"\0") + b"gfx942:sramecc+:xnack-\0") -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.launched: list[bytes] = []
        self.fails: dict[str, int] = {}
        self.properties = properties
        self.held: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("hip"):
            raise AttributeError(name)
        function: Any = lambda *args: self._call(name, list(args))  # noqa: E731
        self.__dict__[name] = function
        return function

    def _call(self, name: str, args: list[Any]) -> Any:
        if name == "hipGetErrorString":
            return b"in words"
        self.calls.append((name, [getattr(a, "value", a) for a in args]))
        if name in self.fails:
            return self.fails[name]
        out = {"hipGetDeviceCount": 1, "hipStreamCreateWithFlags": 11, "hipModuleLoadData": 12}
        out |= {"hipModuleGetFunction": 13, "hipGraphInstantiateWithFlags": 15}
        if name in out:
            args[0]._obj.value = out[name]
        elif name == "hipStreamEndCapture":
            args[1]._obj.value = 14
        elif name == "hipMemGetInfo":
            args[0]._obj.value, args[1]._obj.value = 80, 99
        elif name in ("hipMalloc", "hipHostMalloc"):
            self.held.append(c.create_string_buffer(args[1].value))
            args[0]._obj.value = c.addressof(self.held[-1])
        elif name == "hipDeviceGetName":
            c.memmove(args[0].value, b"MI300X\0", 7)
        elif name == "hipGetDevicePropertiesR0600":
            c.memmove(args[0].value, self.properties, len(self.properties))
        elif name == "hipModuleLaunchKernel":
            pointers = (c.c_void_p * (len(PACKED) // 8)).from_address(args[9])
            self.launched.append(b"".join(c.string_at(p, 8) for p in pointers))
        return 0


def test_hip_works_alike():
    stub = HipStub()
    api = HipApi(stub)
    assert (api.name, api.arch, api.warp_size) == ("MI300X", "gfx942", 64)
    device = DriverDevice(api)
    assert device.free_memory() == 80
    (kernel,) = device.load([SPEC])
    graph = device.record(lambda: device.launch(kernel, (7, 5, 3), ARGS))
    name, args = next(call for call in stub.calls if call[0] == "hipModuleLaunchKernel")
    assert (*args[:9], args[10]) == (13, 7, 5, 3, 256, 1, 1, 0, 11, None) and stub.launched == [PACKED]
    assert stub.hipModuleLaunchKernel.argtypes[1] is c.c_uint
    graph.replay()
    assert stub.calls[-1] == ("hipGraphLaunch", [15, 11])
    address, pinned = device.allocate(64, "data"), device.host_array(32)
    device.upload(address, pinned)
    assert stub.calls[-1] == ("hipMemcpyHtoDAsync", [address, pinned.ctypes.data, 32, 11])
    device.synchronize()
    stub.calls.clear()
    device.close()
    closing = ["hipStreamSynchronize", "hipGraphExecDestroy", "hipModuleUnload", "hipFree", "hipHostFree"]
    assert [name for name, _ in stub.calls] == [*closing, "hipStreamDestroy"]


def test_hips_errors_name_the_call():
    stub = HipStub()
    device = DriverDevice(HipApi(stub))
    stub.fails = {"hipMalloc": 2, "hipStreamSynchronize": 719}
    with pytest.raises(ResourceError, match="MI300X: 64 bytes for data cannot be had: it has 80 bytes free"):
        device.allocate(64, "data")
    with pytest.raises(EngineError, match="MI300X: hipStreamSynchronize failed: error 719, in words"):
        device.synchronize()


@pytest.mark.parametrize("properties", [b"AMD\0".ljust(2000, b"\0"), b"gfx942\0".ljust(2000, b"\0")])
def test_an_architecture_that_is_not_said_is_no_guess(properties):
    with pytest.raises(Unavailable, match="does not say its architecture"):
        HipApi(HipStub(properties))
