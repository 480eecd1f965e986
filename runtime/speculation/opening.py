"""From a drafter's name to what the engine's core is given."""

from __future__ import annotations

from runtime.artifact import Artifact
from runtime.errors import ResourceError
from runtime.executor import Executor
from runtime.log import Log
from runtime.memory.options import Options
from runtime.speculation.choose import Acceptance
from runtime.speculation.drafter import Drafter
from runtime.speculation.lookup import LookupDrafter
from runtime.speculation.pace import Pace
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
    raise ResourceError(f"draft = {draft!r}", where="load", todo="Use 'lookup'")
