"""Every logit of an artifact's compiled forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from runtime.artifact import Artifact
from runtime.cpu.executor import CpuExecutor
from runtime.limits import Limits
from runtime.step import Step

Array = np.ndarray[Any, np.dtype[Any]]
STEP_TOKENS = 256  # as many rows of logits are held at once


def write_logits(engine: Path, windows: Array, out: Path, threads: int) -> None:
    """Logits [W, S, V] of token ids [W, S] into the .npy file `out`; each window begins an empty cache."""
    artifact = Artifact.open(engine, verify="fast")
    shape = (*windows.shape, artifact.manifest.model.vocab_size)
    found = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    for window, logits in zip(windows, found, strict=True):
        _run(artifact, window, logits, threads)
    found.flush()


def _run(artifact: Artifact, ids: Array, out: Array, threads: int) -> None:
    groups = artifact.manifest.kv_groups
    blocks = [-(-len(ids) // group.block) for group in groups]
    executor = CpuExecutor(artifact, Limits(STEP_TOKENS, 1, STEP_TOKENS), blocks, threads=threads)
    try:
        for start in range(0, len(ids), STEP_TOKENS):
            end = min(start + STEP_TOKENS, len(ids))
            step = _step(ids[start:end], start, blocks)
            out[start:end] = executor.download(executor.forward(step))
    finally:
        executor.close()


def _step(ids: Array, start: int, blocks: list[int]) -> Step:
    """Tokens from `start` on of a request whose blocks lie in order: a token's slot is its position."""
    pos = np.arange(start, start + len(ids), dtype=np.int32)
    return Step(
        ids=np.ascontiguousarray(ids, np.int32),
        pos=pos,
        starts=np.array([0, len(ids)], np.int32),
        lens=np.array([start + len(ids)], np.int32),
        rows=np.arange(len(ids), dtype=np.int32),
        slots=[pos.copy() for _ in blocks],
        tables=[np.arange(count, dtype=np.int32)[None] for count in blocks],
    )


def weight_bytes(engine: Path) -> int:
    """Of the CPU's weights as they are stored, scales and padding included."""
    return sum(file.stat().st_size for file in (engine / "weights").glob("cpu*.safetensors"))
