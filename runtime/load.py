"""From an artifact on disk to an engine: checked, memory planned, compiled code opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from runtime import machine
from runtime.artifact import Artifact, Verify
from runtime.cpu import CpuExecutor
from runtime.engine import Engine
from runtime.errors import ResourceError
from runtime.executor import Executor
from runtime.kv.budget import plan_blocks
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.manifest import CpuTarget, GpuTarget, KVGroup
from runtime.scheduler import Limits
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.gpu.executor import GpuExecutor

DEVICE_SHARE = 0.9  # for the KV cache, of what weights and arena leave of a device's memory

Plan = Callable[..., list[int]]  # blocks per group: plan_blocks, but for what it is a share of


def load(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    threads: int | None = None,
    kv_blocks: int | None = None,
    kv_memory: int | str | None = None,
    max_step_tokens: int | None = None,
    max_requests: int | None = None,
    prefix_cache: bool = True,
    swap_memory: int | str = 0,
    verify: Verify = "full",
    digest: str | None = None,
    isa: str | None = None,
) -> Engine:
    """Load an artifact.

    target: one that it was compiled for; default, the best that this machine can run: a GPU's, else the
    CPU's. threads: of the CPU target; default, the cores this process may use. kv_blocks: blocks in every KV
    group; kv_memory: bytes instead, or a text like "2GiB"; default, half of the memory that the weights leave
    free (nine tenths of a GPU's), or less if max_requests (64) requests of the whole context need less.
    swap_memory: the host's for blocks of preempted requests, which are else computed again. max_step_tokens
    (512): tokens computed at once, over all requests. verify="fast" does not hash the weights. digest: what
    the manifest's digest must be. isa: of the CPU target, a kernel by name instead of the best that fits.
    Raises ArtifactError, ResourceError.
    """
    limits = Limits(
        _count("max_step_tokens", max_step_tokens, Limits.max_step_tokens),
        _count("max_requests", max_requests, Limits.max_requests),
    )
    num_threads = _count("threads", threads, machine.default_threads())
    artifact = Artifact.open(path, verify=verify, digest=digest)
    found = artifact.target(_choose(artifact) if target is None else target)
    model, groups = artifact.manifest.model, artifact.manifest.kv_groups
    plan = partial(plan_blocks, groups, limits, model.max_context, kv_blocks, kv_memory)
    places = _places(groups, swap_memory)
    if isinstance(found, CpuTarget):
        executor, counts = _open_cpu(artifact, limits, plan, places, num_threads, isa)
    elif isa is None:
        executor, counts = _open_gpu(artifact, found, limits, plan, places)
    else:
        todo = "Leave it out, or load for the target cpu"
        raise ResourceError(f"isa = {isa!r} with the target {found.name}", todo=todo)
    cache = Cache(
        [Group(count, group.window) for count, group in zip(counts, groups, strict=True)],
        block=groups[0].block if groups else 16,
        prefix_cache=prefix_cache,
        salt=os.urandom(16),
    )
    return Engine(executor, model, cache, limits, Tokenizer.of(artifact), Swap(cache, places))


def _choose(artifact: Artifact) -> str:
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


def _open_cpu(
    artifact: Artifact, limits: Limits, plan: Plan, places: int, threads: int, isa: str | None
) -> tuple[Executor, list[int]]:
    counts = plan(held=artifact.manifest.files[artifact.weights()].bytes)
    return CpuExecutor(artifact, limits, counts, threads, isa, swap_blocks=places), counts


def _open_gpu(
    artifact: Artifact, target: GpuTarget, limits: Limits, plan: Plan, places: int
) -> tuple[GpuExecutor, list[int]]:
    from runtime.gpu.executor import GpuExecutor  # not loaded where there are none
    from runtime.gpu.targets import open_target

    device, compiled = open_target(artifact, target)
    try:
        held = compiled.needs(limits, [0] * len(compiled.groups)).total
        share = {} if target.backend == "interpret" else {"share": DEVICE_SHARE}
        counts = plan(held=held, free=device.free_memory(), **share)
    except BaseException:
        device.close()
        raise
    return GpuExecutor(device, compiled, limits, counts, swap_blocks=places), counts


def _places(groups: Sequence[KVGroup], swap_memory: int | str) -> int:
    """Blocks of every group that the host has room for."""
    return machine.parse_bytes(swap_memory) // max(1, sum(group.block_bytes for group in groups))


def _count(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
        raise ResourceError(f"{name} = {value!r}", todo="Use an integer from 1 to 1048576")
    return value
