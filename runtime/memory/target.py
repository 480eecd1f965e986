"""What each kind of target takes of memory: counted from an artifact, the same for loading and for asking."""

from __future__ import annotations

import os

from runtime import machine
from runtime.artifact import Artifact
from runtime.cpu.memory import count_workspace
from runtime.cpu.plan import Plan
from runtime.limits import Limits
from runtime.manifest import CpuTarget, GpuTarget
from runtime.memory.beside import plan_beside
from runtime.memory.options import Options
from runtime.memory.plan import DraftMemory, MemoryPlan, Place
from runtime.speculation.choose import NAMES
from runtime.targets import choose_target

SHAPES_ALONE = "the bytes of the weights, which are not counted: it was compiled from shapes alone"


def plan(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    kv_blocks: int | None = None,
    kv_memory: int | str | None = None,
    max_step_tokens: int | None = None,
    max_requests: int | None = None,
    swap_memory: int | str = 0,
    draft: str | os.PathLike[str] | None = None,
    max_draft_tokens: int | None = None,
) -> MemoryPlan:
    """The memory that load() would take with these options. Nothing is taken, and no weights are read.

    It may exceed what is free: MemoryPlan.check() raises then, as load() does. Of a GPU's target on a machine
    without such a GPU, and of an artifact of shapes alone, it says what is unknown. Raises ArtifactError,
    ResourceError.
    """
    options = Options.of(
        kv_blocks,
        kv_memory,
        max_step_tokens,
        max_requests,
        swap_memory,
        draft=draft,
        max_draft_tokens=max_draft_tokens,
    )
    artifact = Artifact.open(path, verify="fast")
    found = artifact.target(choose_target(artifact) if target is None else target)
    if isinstance(found, CpuTarget):
        return plan_cpu(artifact, options)
    from runtime.gpu.targets import find_place  # not loaded where there are none

    return plan_gpu(artifact, found, options, *find_place(found))


def plan_cpu(artifact: Artifact, options: Options) -> MemoryPlan:
    """The weights count as their file, which is mapped, or copied once into huge pages."""
    manifest, target = artifact.manifest, artifact.cpu
    limits, model = options.limits, manifest.model
    threads = machine.default_threads() if options.threads is None else options.threads
    arena = Plan.parse(artifact.read(target.plan), target.plan)
    work = count_workspace(arena, limits, model, manifest.kv_groups, threads)
    weight_bytes = None if target.weights is None else manifest.files[target.weights].bytes
    unknown = [SHAPES_ALONE] if weight_bytes is None else []
    place, groups = Place.host(), manifest.kv_groups

    def planned(options: Options, draft: DraftMemory | None) -> MemoryPlan:
        return options.plan("cpu", place, model, groups, weight_bytes, work, unknown, draft)

    if options.draft is not None and options.draft not in NAMES:
        return plan_beside(Artifact.open(options.draft, verify="fast"), options, planned)
    return planned(options, own_draft(artifact, limits, threads) if options.draft == "self" else None)


def own_draft(artifact: Artifact, limits: Limits, threads: int) -> DraftMemory:
    """Of an artifact's own draft, on the target's blocks. Raises ArtifactError where it has none."""
    manifest, target, limits = artifact.manifest, artifact.draft(), limits.drafting
    arena = Plan.parse(artifact.read(target.plan), target.plan)
    work = count_workspace(arena, limits, manifest.model, manifest.kv_groups, threads)
    return DraftMemory(0 if target.weights is None else manifest.files[target.weights].bytes, work)


def plan_gpu(
    artifact: Artifact, target: GpuTarget, options: Options, place: Place, unknown: str | None = None
) -> MemoryPlan:
    """place: of its device. unknown: why its free memory is."""
    from runtime.gpu import memory as gpu  # not loaded where there are none
    from runtime.gpu.plan import Plan as Launches
    from runtime.weights import tensor_bytes

    manifest, limits = artifact.manifest, options.limits
    launches = Launches.parse(artifact.read(target.plan), target.plan)
    work = gpu.count_workspace(launches, limits, manifest.model, manifest.kv_groups)
    notes, weight_bytes = [SHAPES_ALONE], None
    if target.weights is not None:
        sizes = tensor_bytes(artifact.path(target.weights), target.weight_order)
        notes, (_, weight_bytes) = [], gpu.weight_offsets(sizes)
    if unknown is not None:
        notes.append(unknown)
    return options.plan(target.name, place, manifest.model, manifest.kv_groups, weight_bytes, work, notes)
