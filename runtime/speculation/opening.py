"""From a drafter's name to what the engine's core is given."""

from __future__ import annotations

from runtime.artifact import Artifact
from runtime.cpu.forward import CpuForward
from runtime.errors import ResourceError
from runtime.executor import Executor
from runtime.log import Log
from runtime.memory.options import Options
from runtime.speculation.choose import Acceptance
from runtime.speculation.drafter import Drafter
from runtime.speculation.lookup import LookupDrafter
from runtime.speculation.pace import Pace
from runtime.speculation.self import SelfDrafter
from runtime.speculation.speculation import Speculation

MODEL_SHARE = 0.3  # of a target's step that one of a model that drafts takes, until it was measured


def open_speculation(
    options: Options, acceptance: Acceptance, artifact: Artifact, executor: Executor, log: Log
) -> Speculation | None:
    """None where nothing is drafted. Raises ArtifactError, ResourceError."""
    if options.draft is None:
        return None
    drafter = _open(options.draft, options, artifact, executor)
    pace = Pace(options.max_draft_tokens, share=0.0 if options.draft == "lookup" else MODEL_SHARE)
    return Speculation(drafter, pace, artifact.manifest.model.vocab_size, log, acceptance)


def _open(draft: str, options: Options, artifact: Artifact, executor: Executor) -> Drafter:
    if draft == "lookup":
        return LookupDrafter()
    if draft == "self":
        return _open_self(options, artifact, executor)
    raise ResourceError(f"draft = {draft!r}", where="load", todo="Use 'lookup' or 'self'")


def _open_self(options: Options, artifact: Artifact, executor: Executor) -> Drafter:
    """Of an executor that was opened with it."""
    forward = getattr(executor, "draft", None)
    if not isinstance(forward, CpuForward):
        what = f"the target {executor.target} has no draft of its own"
        todo = "Use 'lookup', or load for the target cpu"
        raise ResourceError(what, where="draft = 'self'", todo=todo)
    return SelfDrafter(forward, options.limits.drafting, artifact.manifest)
