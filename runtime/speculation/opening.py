"""From a drafter's name to what the engine's core is given."""

from __future__ import annotations

from runtime.artifact import Artifact, Verify
from runtime.cpu.forward import CpuForward
from runtime.errors import ResourceError
from runtime.executor import Executor
from runtime.log import Log
from runtime.memory.options import Options
from runtime.memory.plan import MemoryPlan
from runtime.speculation.beside import open_engine
from runtime.speculation.choose import NAMES, Acceptance
from runtime.speculation.drafter import Drafter
from runtime.speculation.lookup import LookupDrafter
from runtime.speculation.pace import Pace
from runtime.speculation.self import SelfDrafter
from runtime.speculation.speculation import Speculation

MODEL_SHARE = 0.3  # of a target's step that one of a model that drafts takes, until it was measured


def open_speculation(
    options: Options,
    acceptance: Acceptance,
    artifact: Artifact,
    executor: Executor,
    memory: MemoryPlan,
    log: Log,
    verify: Verify,
) -> Speculation | None:
    """None where nothing is drafted. memory: as planned, with the drafter's. verify: of another artifact's
    files. Raises ArtifactError, ResourceError."""
    if options.draft is None:
        return None
    if options.draft in NAMES:
        drafter = _open(options.draft, options, artifact, executor, acceptance)
    else:
        drafter = open_engine(options.draft, artifact, options, memory, verify)
    pace = Pace(options.max_draft_tokens, share=0.0 if options.draft == "lookup" else MODEL_SHARE)
    return Speculation(drafter, pace, artifact.manifest.model.vocab_size, log, acceptance)


def _open(
    draft: str, options: Options, artifact: Artifact, executor: Executor, acceptance: Acceptance
) -> Drafter:
    """By one of NAMES; the artifact's own draft where the executor was opened with it."""
    if draft == "lookup":
        return LookupDrafter()
    forward = getattr(executor, "draft", None)
    if not isinstance(forward, CpuForward):
        what = f"the target {executor.target} has no draft of its own"
        todo = "Use 'lookup', or load for the target cpu"
        raise ResourceError(what, where="draft = 'self'", todo=todo)
    keeps = acceptance == "rejection"
    return SelfDrafter(forward, options.limits.drafting, artifact.manifest, keeps=keeps)
