"""GPU targets of an artifact on this machine: which one its devices can run, and the device opened for it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import PurePosixPath

from runtime import machine
from runtime.artifact import Artifact
from runtime.errors import ResourceError
from runtime.gpu.compiled import Compiled
from runtime.gpu.cuda import CudaApi
from runtime.gpu.device import Device, KernelSpec
from runtime.gpu.driver import DriverDevice
from runtime.gpu.hip import HipApi
from runtime.gpu.interpret import InterpretedDevice
from runtime.gpu.kernels import parse_kernels
from runtime.gpu.plan import Plan
from runtime.gpu.rebuild import rebuilt
from runtime.gpu.vendor import Api, Unavailable
from runtime.manifest import GpuTarget
from runtime.memory.plan import DEVICE_PERCENT, Place
from runtime.weights import Weights

FIRST_OF_ITS_OWN = 90  # from compute capability 9.0 on, binaries are of one architecture alone


def find_api(backend: str) -> Api:
    """The first GPU of a vendor's. Raises Unavailable."""
    return CudaApi.find() if backend == "cuda" else HipApi.find()


def runs(binary: str, device: str) -> bool:
    """Whether a device runs binaries of an architecture: its own, or an older one of the same generation."""
    if binary == device:
        return True
    if not (binary.startswith("sm_") and device.startswith("sm_")):
        return False
    built, have = int(binary[3:]), int(device[3:])
    return built < FIRST_OF_ITS_OWN and built // 10 == have // 10 and built <= have


def runs_as_built(artifact: Artifact, target: GpuTarget, api: Api) -> bool:
    """Whether a device runs a target's binaries: devices of one generation differ in shared memory."""
    if not runs(target.arch, api.arch):
        return False
    if target.arch == api.arch or api.shared_bytes is None:
        return True
    listed = parse_kernels(artifact.read(target.kernels), target.kernels, lambda name: b"")
    return max((spec.shared_bytes for spec in listed), default=0) <= api.shared_bytes


def best(artifact: Artifact, targets: Sequence[GpuTarget]) -> GpuTarget | None:
    """The target that this machine's GPU runs; else one that it runs once rebuilt, if Triton is here."""
    found: dict[str, Api] = {}
    for backend in {target.backend for target in targets} - {"interpret"}:
        try:
            found[backend] = find_api(backend)
        except Unavailable:
            continue
    there = [target for target in targets if target.backend in found]
    fitting = [target for target in there if runs_as_built(artifact, target, found[target.backend])]
    if fitting:
        return max(fitting, key=lambda target: target.arch == found[target.backend].arch)
    return there[0] if there and find_spec("triton") is not None else None


def open_target(artifact: Artifact, target: GpuTarget) -> tuple[Device, Compiled]:
    """Raises ResourceError where this machine lacks what the target needs."""
    device, kernels = open_device(artifact, target)
    try:
        return device, read_compiled(artifact, target, kernels)
    except BaseException:
        device.close()
        raise


def read_compiled(artifact: Artifact, target: GpuTarget, kernels: Sequence[KernelSpec]) -> Compiled:
    """What the device runs, its weights mapped. kernels: as open_device found them."""
    plan = Plan.parse(artifact.read(target.plan), target.plan)
    file = artifact.path(artifact.weights(target.name))
    weights = Weights(file, target.weight_order, plan.weights)
    manifest = artifact.manifest
    return Compiled(target.name, plan, kernels, weights, manifest.model, manifest.kv_groups)


def place_of(device: Device, target: GpuTarget) -> Place:
    """Where the target's memory is taken: the interpreter's is the host's."""
    if target.backend == "interpret":
        return Place("the host", device.free_memory())
    return Place(device.name, device.free_memory(), machine.free_memory(), DEVICE_PERCENT)


def find_place(target: GpuTarget) -> tuple[Place, str | None]:
    """The place of a target that is not opened, and what is unknown where its device is not here."""
    if target.backend == "interpret":
        return Place.host(), None
    try:
        device = DriverDevice(find_api(target.backend))
    except Unavailable as error:
        place = Place(f"a device of {target.name}", None, machine.free_memory(), DEVICE_PERCENT)
        return (
            place,
            f"the device's free memory ({error}): a share of it is planned as enough for all requests",
        )
    try:
        return place_of(device, target), None
    finally:
        device.close()


def open_device(artifact: Artifact, target: GpuTarget) -> tuple[Device, Sequence[KernelSpec]]:
    """The device, of which nothing is taken yet, and the kernels that it runs. Raises ResourceError."""
    artifact.weights(target.name)  # there are some
    if target.backend == "interpret":
        return InterpretedDevice(artifact.path(target.source)), _kernels(artifact, target)
    try:
        api = find_api(target.backend)
    except Unavailable as error:
        raise _lacking(artifact, target, str(error)) from error
    if runs_as_built(artifact, target, api):
        kernels = _kernels(artifact, target)
    else:
        kernels = rebuilt(artifact, target, f"{target.backend}:{api.arch}", api.name)
    return DriverDevice(api), kernels  # opened last: nothing has to close it


def _kernels(artifact: Artifact, target: GpuTarget) -> Sequence[KernelSpec]:
    folder = PurePosixPath(target.kernels).parent
    data = artifact.read(target.kernels)
    return parse_kernels(data, target.kernels, lambda name: artifact.read(str(folder / name)))


def _lacking(artifact: Artifact, target: GpuTarget, found: str) -> ResourceError:
    if target.backend == "cuda":
        digits = target.arch.removeprefix("sm_")
        what = f"an NVIDIA GPU of compute capability {digits[:-1]}.{digits[-1]} and its driver"
    else:
        what = f"an AMD GPU of architecture {target.arch} and its driver"
    has_cpu = "cpu" in artifact.manifest.targets
    return ResourceError(
        f"its target {target.name} needs {what}; {found}",
        where=artifact.root.name,
        todo=f"{'Load' if has_cpu else 'Compile'} it with --target cpu to run here",
    )
