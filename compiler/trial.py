"""Runs a fresh artifact's compiled forward once, before anyone else sees the artifact.

A GPU target runs in a process of its own: Triton's interpreter does not share one with what compiles, and a
fault of a kernel ends the context that it ran in. That process is this module, run with the artifact, the
target and the file that gets the logits.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np

from compiler.check import Batch, pack_step, random_batch
from compiler.errors import CompilerFault
from compiler.targets import DRAFT
from runtime.artifact import Artifact
from runtime.cpu.executor import CpuExecutor
from runtime.errors import ArtifactError, OctavoError
from runtime.executor import Executor
from runtime.gpu.executor import GpuExecutor
from runtime.gpu.plan import Plan, evaluate
from runtime.gpu.targets import find_api, open_target, runs_as_built
from runtime.gpu.vendor import Unavailable
from runtime.limits import Limits
from runtime.manifest import GpuTarget
from runtime.step import Step

HERE = ("cpu", DRAFT)  # those that are tried in this process
Array = np.ndarray[Any, np.dtype[Any]]
MAX_INTERPRETED = 2000  # programs that are worth waiting for: they take some 10 ms each
TIMEOUT_S = 900  # far above what MAX_INTERPRETED programs take
ROOT = Path(__file__).parent.parent


class NotRun(Exception):
    """This machine cannot run the target, or not in a short time; the message says why."""


def open_sealed(root: Path) -> Artifact:
    """The artifact, its manifest read as the runtime reads it; the weights were hashed a moment ago."""
    return Artifact.open(root, verify="fast")


def compiled_logits(artifact: Artifact, target: str) -> Array:
    """Logits [all tokens in request order, V] of a target, or of the CPU's draft, for trial_batch().

    Raises NotRun, and CompilerFault where what was compiled fails.
    """
    check_runnable(artifact, target)
    return logits_of(artifact, target) if target in HERE else _in_a_process(artifact, target)


def trial_batch(artifact: Artifact) -> Batch:
    model, groups = artifact.manifest.model, artifact.manifest.kv_groups
    return random_batch(model.vocab_size, model.max_context, groups[0].block)


def check_runnable(artifact: Artifact, target: str) -> None:
    """Raises NotRun where this machine lacks what the target needs."""
    if target in HERE:
        try:
            artifact.kernel() if target == "cpu" else artifact.draft_kernel()
        except ArtifactError as error:
            raise NotRun("no kernel was built for this machine's CPU") from error
        return
    gpu = cast(GpuTarget, artifact.target(target))
    if gpu.backend == "interpret":
        if find_spec("triton") is None:
            raise NotRun("Triton is not installed: pip install 'octavo[triton]'")
        count = num_programs(artifact, gpu)
        if count > MAX_INTERPRETED:
            raise NotRun(f"{count:,} programs would take the interpreter minutes")
        return
    try:
        found = find_api(gpu.backend)
    except Unavailable as error:
        raise NotRun(f"there is no such GPU here: {error}") from error
    if not runs_as_built(artifact, gpu, found):
        raise NotRun(f"the GPU here is {found.arch}, for which kernels have to be built again")


def num_programs(artifact: Artifact, target: GpuTarget) -> int:
    """Instances of kernels that the trial's steps start."""
    plan = Plan.parse(artifact.read(target.plan), target.plan)
    found = 0
    for step in _steps(artifact, trial_batch(artifact)):
        sizes = {"T": len(step.ids), "R": len(step.lens), "Q": len(step.rows)}
        sizes |= {f"M{group}": table.shape[1] for group, table in enumerate(step.tables)}
        launches = [launch for entry in plan.sections["forward"] for launch in entry.choose(sizes)]
        found += sum(math.prod(evaluate(size, sizes) for size in launch.grid) for launch in launches)
    return found


def _in_a_process(artifact: Artifact, target: str) -> Array:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        command = [sys.executable, "-m", "compiler.trial", str(artifact.root), target, str(out)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
        try:
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            what = f"the compiled forward has not ended after {TIMEOUT_S} s"
            raise CompilerFault(what, where=target) from error
        if done.returncode:
            *_, said = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
            raise CompilerFault(f"the compiled forward for {target} fails: {said}", where=target)
        return np.load(out)


def logits_of(artifact: Artifact, target: str) -> Array:
    """The trial's logits, computed here over several steps and scattered blocks."""
    batch = trial_batch(artifact)
    blocks = [1 + sum(-(-n // g.block) for n in batch.lengths) for g in artifact.manifest.kv_groups]
    limits = Limits(sum(batch.lengths), len(batch.lengths), sum(batch.lengths))
    executor = open_executor(artifact, target, limits, blocks)
    logits = np.zeros((sum(batch.lengths), artifact.manifest.model.vocab_size), np.float32)
    try:
        for chunks, step in zip(batch.steps, _steps(artifact, batch), strict=True):
            index = np.concatenate([batch.offset(r) + np.arange(lo, hi) for r, lo, hi in chunks])
            logits[index] = executor.download(executor.forward(step))
    finally:
        executor.close()
    return logits


def open_executor(artifact: Artifact, target: str, limits: Limits, num_blocks: Sequence[int]) -> Executor:
    """A target's executor in this process, for a few steps. Raises ResourceError where the machine lacks what
    it needs."""
    if target in HERE:
        draft = artifact.draft() if target == DRAFT else None
        return CpuExecutor(artifact, limits, num_blocks, threads=2, compiled=draft, move_weights=False)
    device, compiled = open_target(artifact, cast(GpuTarget, artifact.target(target)))
    return GpuExecutor(device, compiled, limits, num_blocks)


def _steps(artifact: Artifact, batch: Batch) -> list[Step]:
    groups = artifact.manifest.kv_groups
    tables = {f"kv{i}": (g.block, _scattered_blocks(batch, g.block)) for i, g in enumerate(groups)}
    return [_step(pack_step(batch, chunks, tables), len(groups)) for chunks in batch.steps]


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


def main() -> None:
    root, target, out = sys.argv[1:]
    try:
        np.save(out, logits_of(open_sealed(Path(root)), target))
    except OctavoError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
