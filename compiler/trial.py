"""Runs a fresh artifact's compiled forward once, before anyone else sees the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from compiler.check import Batch, pack_step
from runtime.artifact import Artifact
from runtime.cpu import CpuExecutor
from runtime.errors import ArtifactError
from runtime.scheduler import Limits
from runtime.step import Step

Array = np.ndarray[Any, np.dtype[Any]]


class NotRun(Exception):
    """This machine cannot run the target, or not in a short time; the message says why."""


def runnable(artifact: Artifact) -> bool:
    """Whether this machine has a CPU that one of the kernels is for."""
    try:
        artifact.kernel()
    except ArtifactError:
        return False
    return True


def open_sealed(root: Path) -> Artifact:
    """The artifact, its manifest read as the runtime reads it; the weights were hashed a moment ago."""
    return Artifact.open(root, verify="fast")


def compiled_logits(artifact: Artifact, target: str, batch: Batch) -> Array:
    """Logits [all tokens in request order, V] of a batch, over several steps and scattered blocks.

    Raises NotRun.
    """
    if target != "cpu":
        raise NotRun("there is no such GPU here")
    if not runnable(artifact):
        raise NotRun("no kernel was built for this machine's CPU")
    groups = artifact.manifest.kv_groups
    tables = {f"kv{i}": (g.block, _scattered_blocks(batch, g.block)) for i, g in enumerate(groups)}
    num_blocks = [1 + sum(map(len, blocks)) for _, blocks in tables.values()]
    limits = Limits(sum(batch.lengths), len(batch.lengths), sum(batch.lengths))
    executor = CpuExecutor(artifact, limits, num_blocks, threads=2)
    logits = np.zeros((sum(batch.lengths), artifact.manifest.model.vocab_size), np.float32)
    try:
        for step in batch.steps:
            index = np.concatenate([batch.offset(r) + np.arange(lo, hi) for r, lo, hi in step])
            rows = executor.forward(_step(pack_step(batch, step, tables), len(groups)))
            logits[index] = executor.download(rows)
    finally:
        executor.close()
    return logits


def _scattered_blocks(batch: Batch, block: int) -> list[list[int]]:
    """Block ids of each request, the requests' interleaved from the top down; block 0 stays unused."""
    counts = [-(-n // block) for n in batch.lengths]
    order = sorted((i, r) for r, count in enumerate(counts) for i in range(count))
    ids: list[list[int]] = [[] for _ in counts]
    for block_id, (_, request) in zip(range(sum(counts), 0, -1), order, strict=True):
        ids[request].append(block_id)
    return ids


def _step(inputs: dict[str, Array], num_groups: int) -> Step:
    names = ("ids", "pos", "starts", "lens", "rows")
    packed = {name: np.ascontiguousarray(inputs[name], np.int32) for name in inputs}
    return Step(
        **{name: packed[name] for name in names},
        slots=[packed[f"slots{g}"] for g in range(num_groups)],
        tables=[packed[f"table{g}"] for g in range(num_groups)],
    )
