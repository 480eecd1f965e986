"""Opening another artifact to draft for one: with the same tokens, and memory of its own."""

from __future__ import annotations

import os

from runtime import machine
from runtime.artifact import Artifact, Verify
from runtime.cpu.executor import CpuExecutor
from runtime.errors import ArtifactError, ResourceError, shown
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.memory.beside import engine_limits
from runtime.memory.options import Options
from runtime.memory.plan import MemoryPlan
from runtime.speculation.engine import EngineDrafter
from runtime.tokenizer import Tokenizer

_TODO = "Give the artifact of a smaller model of the same family, or use 'lookup'"


def open_engine(
    path: str, artifact: Artifact, options: Options, memory: MemoryPlan, verify: Verify
) -> EngineDrafter:
    """The drafter of an artifact at a path. memory: of the target, planned with it. verify: of its files.

    Raises ArtifactError, and ResourceError where its tokens are others or the target is no CPU.
    """
    if memory.draft is None or not memory.draft.blocks:
        what = f"the target {memory.target} takes no other artifact as its drafter"
        raise ResourceError(what, where=_where(path), todo="Load for the target cpu, or use 'lookup'")
    drafter = Artifact.open(path, verify=verify)
    check_tokens(drafter, artifact, path)
    manifest, limits = drafter.manifest, engine_limits(options.limits)
    threads = machine.default_threads() if options.threads is None else options.threads
    blocks, groups = memory.draft.blocks, manifest.kv_groups
    if len(blocks) != len(groups):
        raise ArtifactError("another artifact was put in its place", where=path, todo="Try again")
    held = [Group(count, g.window, g.tail, g.state) for count, g in zip(blocks, groups, strict=True)]
    cache = Cache(held, block=groups[0].block if groups else 16, salt=os.urandom(16))
    executor = CpuExecutor(drafter, limits, blocks, threads)
    model = manifest.model
    return EngineDrafter(path, executor, cache, limits, model.max_context, model.vocab_size)


def check_tokens(drafter: Artifact, artifact: Artifact, path: str) -> None:
    """Raises ResourceError where a token of the target's vocabulary is another in the drafter's, or none."""
    own, others = Tokenizer.of(artifact), Tokenizer.of(drafter)
    if own is None and others is None:
        sizes = artifact.manifest.model.vocab_size, drafter.manifest.model.vocab_size
        if sizes[0] != sizes[1]:
            what = f"it knows {sizes[1]:,} tokens, the target {sizes[0]:,}; neither has a tokenizer"
            raise ResourceError(what, where=_where(path), todo=_TODO)
        return
    if own is None or others is None:
        lacking = "the target" if own is None else "it"
        what = f"{lacking} was compiled without a tokenizer: whether the tokens are the same is unknown"
        raise ResourceError(what, where=_where(path), todo=_TODO)
    known = others.vocabulary
    differ = sorted((i, token) for token, i in own.vocabulary.items() if known.get(token) != i)
    if differ:
        i, token = differ[0]
        there = "lacks it" if token not in known else f"has it as {known[token]}"
        what = f"its tokenizer is another: of {len(own.vocabulary):,} tokens {len(differ):,} differ, such as "
        what += f"{shown(token, 40)}, {i} of the target's, which {there}"
        raise ResourceError(what, where=_where(path), todo=_TODO)


def _where(path: str) -> str:
    return f"draft = {shown(path)}"
