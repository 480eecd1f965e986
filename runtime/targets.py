"""Which of an artifact's targets this machine runs."""

from __future__ import annotations

from runtime.artifact import Artifact
from runtime.manifest import GpuTarget


def choose_target(artifact: Artifact) -> str:
    """The best target that this machine can run; where it can run none, one that says what it needs."""
    targets = artifact.manifest.targets
    gpus = [target for target in targets.values() if isinstance(target, GpuTarget)]
    if gpus:
        from runtime.gpu.targets import best  # not loaded where there are none

        found = best(artifact, gpus)
        if found is not None:
            return found.name
    interpreted = [target.name for target in gpus if target.backend == "interpret"]
    return "cpu" if "cpu" in targets or not targets else next(iter([*interpreted, *targets]))
