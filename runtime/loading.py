"""From an artifact on disk to an engine: checked, memory planned, compiled code opened."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runtime import machine
from runtime.artifact import TRIES, Artifact, Report, Verify
from runtime.cpu.executor import CpuExecutor
from runtime.engine import Engine
from runtime.errors import ArtifactError, ResourceError, shown
from runtime.executor import Executor
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.manifest import CpuTarget, GpuTarget
from runtime.memory.options import Options
from runtime.memory.plan import MemoryPlan
from runtime.memory.target import plan_cpu, plan_gpu
from runtime.speculation.choose import Acceptance, check_acceptance
from runtime.speculation.opening import open_speculation
from runtime.targets import choose_target
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.gpu.executor import GpuExecutor


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
    report: Report | None = None,
    draft: str | os.PathLike[str] | None = None,
    acceptance: Acceptance | None = None,
    max_draft_tokens: int | None = None,
) -> Engine:
    """Load an artifact.

    target: one that it was compiled for; default, the best that this machine can run: a GPU's, else the
    CPU's. threads: of the CPU target; default, the cores this process may use. kv_blocks: blocks in every KV
    group; kv_memory: bytes instead, a text like "2GiB", or a share of what weights, workspace and swap leave
    free, like "40%"; default, "50%" ("90%" of a GPU's), or less if max_requests (64) requests of the whole
    context need less. swap_memory: the host's for blocks of preempted requests, which are else computed
    again. max_step_tokens (512): tokens computed at once, over all requests. verify="fast" does not hash the
    weights. digest: what the manifest's digest must be. isa: of the CPU target, a kernel by name instead of
    the best that fits. report(done, total) is told how many of the artifact's bytes were hashed. draft: what
    proposes tokens, of which several are then verified in one step: "lookup" (what followed the last ones
    earlier in the prompt or output), "self" (the artifact's own draft, octavo compile --draft), or the path
    of another artifact with the same tokenizer. max_draft_tokens: of a request in a step, at most; default,
    8; fewer, down to none, where they do not pay. acceptance="exact", the default, changes no bit of any
    output; "rejection" keeps the distribution alone, and accepts more of what is sampled. Both are refused
    where nothing drafts.
    Raises ArtifactError, and ResourceError before any memory is taken that is not there; Engine.memory is the
    plan, which `plan` gives without loading.
    """
    if not isinstance(prefix_cache, bool):
        what = f"prefix_cache = {shown(prefix_cache)}"
        raise ResourceError(what, where="load", todo="Use True or False")
    num_threads = machine.default_threads() if threads is None else threads
    options = Options.of(
        kv_blocks, kv_memory, max_step_tokens, max_requests, swap_memory, num_threads, draft, max_draft_tokens
    )
    accepted = check_acceptance(acceptance, options.draft)
    for tries_left in reversed(range(TRIES)):
        artifact = Artifact.open(path, verify=verify, digest=digest, report=report)
        try:
            return _load(artifact, options, target, num_threads, isa, prefix_cache, accepted, verify)
        except ArtifactError:
            if not tries_left or not artifact.is_replaced:
                raise
    raise AssertionError


def _load(
    artifact: Artifact,
    options: Options,
    target: str | None,
    num_threads: int,
    isa: str | None,
    prefix_cache: bool,
    acceptance: Acceptance,
    verify: Verify,
) -> Engine:
    """verify: a drafter's files. Raises ArtifactError where a compile replaced the artifact meanwhile."""
    found = artifact.target(choose_target(artifact) if target is None else target)
    if isinstance(found, CpuTarget):
        executor, memory = _open_cpu(artifact, options, num_threads, isa)
    elif isa is None:
        executor, memory = _open_gpu(artifact, found, options)
    else:
        todo = "Leave it out, or load for the target cpu"
        what = f"isa = {shown(isa)} with the target {found.name}"
        raise ResourceError(what, where="load", todo=todo)
    cache = Cache(
        [Group(g.blocks, g.window, g.tail, g.state) for g in memory.groups],
        block=memory.groups[0].block if memory.groups else 16,
        prefix_cache=prefix_cache,
        salt=os.urandom(16),
    )
    model = artifact.manifest.model
    swap = Swap(cache, memory.swap_blocks, options.limits.max_requests)
    try:
        tokenizer = Tokenizer.of(artifact)
        artifact.check_place()
        speculation = open_speculation(options, acceptance, artifact, executor, memory, cache.log, verify)
    except BaseException:
        executor.close()
        raise
    return Engine(executor, model, cache, options.limits, tokenizer, swap, memory, speculation)


def _open_cpu(
    artifact: Artifact, options: Options, threads: int, isa: str | None
) -> tuple[Executor, MemoryPlan]:
    artifact.weights()  # there are some
    memory = plan_cpu(artifact, options)
    memory.check()
    swap, blocks = memory.swap_blocks, memory.num_blocks
    draft = options.draft == "self"
    executor = CpuExecutor(artifact, options.limits, blocks, threads, isa, swap_blocks=swap, draft=draft)
    return executor, memory


def _open_gpu(artifact: Artifact, target: GpuTarget, options: Options) -> tuple[GpuExecutor, MemoryPlan]:
    from runtime.gpu.executor import GpuExecutor  # not loaded where there are none
    from runtime.gpu.targets import open_device, place_of, read_compiled

    device, kernels = open_device(artifact, target)
    try:
        memory = plan_gpu(artifact, target, options, place_of(device, target))
        memory.check()
        compiled = read_compiled(artifact, target, kernels)
    except BaseException:
        device.close()
        raise
    swap, blocks = memory.swap_blocks, memory.num_blocks
    return GpuExecutor(device, compiled, options.limits, blocks, swap_blocks=swap), memory
