"""From an artifact on disk to an engine: checked, memory planned, compiled code opened."""

from __future__ import annotations

import os

from runtime import machine
from runtime.artifact import Artifact, Verify
from runtime.budget import plan_blocks
from runtime.cache import Cache, Group
from runtime.cpu import CpuExecutor
from runtime.engine import Engine
from runtime.errors import ResourceError
from runtime.scheduler import Limits
from runtime.tokenizer import Tokenizer


def load(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    kv_blocks: int | None = None,
    kv_memory: int | str | None = None,
    max_step_tokens: int | None = None,
    max_requests: int | None = None,
    prefix_cache: bool = True,
    verify: Verify = "full",
    digest: str | None = None,
    isa: str | None = None,
) -> Engine:
    """Load an artifact.

    threads: default, the cores this process may use. kv_blocks: blocks of 16 tokens in every KV group;
    kv_memory: bytes instead, or a text like "2GiB"; default, half of the memory that the weights leave free,
    or less if max_requests (64) requests of the whole context need less. max_step_tokens (512): tokens
    computed at once, over all requests. verify="fast" does not hash the weights. digest: what the manifest's
    digest must be. isa: a kernel by name instead of the best that fits. Raises ArtifactError, ResourceError.
    """
    limits = Limits(
        _count("max_step_tokens", max_step_tokens, Limits.max_step_tokens),
        _count("max_requests", max_requests, Limits.max_requests),
    )
    num_threads = _count("threads", threads, machine.default_threads())
    artifact = Artifact.open(path, verify=verify, digest=digest)
    model, groups = artifact.manifest.model, artifact.manifest.kv_groups
    weight_bytes = artifact.manifest.files[artifact.weights()].bytes
    counts = plan_blocks(groups, limits, model.max_context, kv_blocks, kv_memory, held=weight_bytes)
    cache = Cache(
        [Group(count, group.window) for count, group in zip(counts, groups, strict=True)],
        block=groups[0].block if groups else 16,
        prefix_cache=prefix_cache,
        salt=os.urandom(16),
    )
    tokenizer = Tokenizer.of(artifact)
    return Engine(CpuExecutor(artifact, limits, counts, num_threads, isa), model, cache, limits, tokenizer)


def _count(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
        raise ResourceError(f"{name} = {value!r}", todo="Use an integer from 1 to 1048576")
    return value
