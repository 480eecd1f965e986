"""What each kind of target takes of memory: counted from an artifact, the same for loading and for asking."""

from __future__ import annotations

import os

from runtime import machine
from runtime.artifact import Artifact
from runtime.cpu import Plan
from runtime.manifest import CpuTarget, GpuTarget, KVGroup, Model
from runtime.memory.options import Options
from runtime.memory.plan import MemoryPlan, Place, Workspace
from runtime.sampling import MAX_LOGPROBS
from runtime.scheduler import Limits

STRIP_TOKENS, STRIP_BYTES = 1024, 64 + 8 + 16 + 16  # of a row of logits in octavo_sample, and what it notes
KEPT_BYTES = 24  # per token of the vocabulary, while a thread collects those that top-k and top-p keep
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
) -> MemoryPlan:
    """The memory that load() would take with these options. Nothing is taken, and no weights are read.

    It may exceed what is free: MemoryPlan.check() raises then, as load() does. Of a GPU's target on a machine
    without such a GPU, and of an artifact of shapes alone, it says what is unknown. Raises ArtifactError,
    ResourceError.
    """
    options = Options.of(kv_blocks, kv_memory, max_step_tokens, max_requests, swap_memory)
    artifact = Artifact.open(path, verify="fast")
    found = artifact.target(choose_target(artifact) if target is None else target)
    if isinstance(found, CpuTarget):
        return plan_cpu(artifact, options)
    from runtime.gpu.targets import find_place  # not loaded where there are none

    return plan_gpu(artifact, found, options, *find_place(found))


def choose_target(artifact: Artifact) -> str:
    """The best target that this machine can run; where it can run none, one that says what it needs."""
    targets = artifact.manifest.targets
    gpus = [target for target in targets.values() if isinstance(target, GpuTarget)]
    if gpus:
        from runtime.gpu.targets import best

        found = best(artifact, gpus)
        if found is not None:
            return found.name
    interpreted = [target.name for target in gpus if target.backend == "interpret"]
    return "cpu" if "cpu" in targets or not targets else next(iter([*interpreted, *targets]))


def plan_cpu(artifact: Artifact, options: Options) -> MemoryPlan:
    """The weights count as their file, which is mapped, or copied once into huge pages."""
    manifest, target = artifact.manifest, artifact.cpu
    limits, model = options.limits, manifest.model
    threads = machine.default_threads() if options.threads is None else options.threads
    work = Workspace(
        arena=Plan.parse(artifact.read(target.plan), target.plan).arena_bytes(limits),
        logits=limits.max_rows * model.vocab_size * 4,
        sampler=sampler_bytes(limits, model, threads),
        inputs=input_bytes(limits, model, manifest.kv_groups),
    )
    weight_bytes = None if target.weights is None else manifest.files[target.weights].bytes
    unknown = [SHAPES_ALONE] if weight_bytes is None else []
    return options.plan("cpu", Place.host(), model, manifest.kv_groups, weight_bytes, work, unknown)


def plan_gpu(
    artifact: Artifact, target: GpuTarget, options: Options, place: Place, unknown: str | None = None
) -> MemoryPlan:
    """place: of its device. unknown: why its free memory is."""
    from runtime.gpu.memory import count_workspace, weight_offsets
    from runtime.gpu.plan import Plan as Launches
    from runtime.weights import tensor_bytes

    manifest, limits = artifact.manifest, options.limits
    launches = Launches.parse(artifact.read(target.plan), target.plan)
    work = count_workspace(launches, limits, manifest.model, manifest.kv_groups)
    notes, weight_bytes = [SHAPES_ALONE], None
    if target.weights is not None:
        sizes = tensor_bytes(artifact.path(target.weights), target.weight_order)
        notes, (_, weight_bytes) = [], weight_offsets(sizes)
    if unknown is not None:
        notes.append(unknown)
    return options.plan(target.name, place, manifest.model, manifest.kv_groups, weight_bytes, work, notes)


def sampler_bytes(limits: Limits, model: Model, threads: int) -> int:
    """The most that a call of octavo_sample takes: parameters and results of its rows, notes on their strips,
    and in each thread the tokens that are kept of a row."""
    rows, vocab = limits.max_rows, model.vocab_size
    strips = -(-vocab // STRIP_TOKENS)
    given, found = 8 + 6 * 4, 4 + 4 + min(MAX_LOGPROBS, vocab) * (4 + 4)
    return rows * (given + found + strips * STRIP_BYTES) + threads * (vocab * KEPT_BYTES + strips * 64)


def input_bytes(limits: Limits, model: Model, groups: tuple[KVGroup, ...]) -> int:
    """Of the arrays that steps are packed into (runtime.step), i32."""
    tokens, requests = limits.max_step_tokens, limits.max_requests
    widths = [-(-model.max_context // group.block) for group in groups]
    numbers = 2 * tokens + 2 * requests + 1 + limits.max_rows + max(tokens, requests) + 1
    return 4 * (numbers + sum(tokens + requests * width for width in widths))
