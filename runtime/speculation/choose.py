"""Drafters by name."""

from __future__ import annotations

import os
from typing import Literal

from runtime.errors import ResourceError, shown

Acceptance = Literal["exact", "rejection"]
NAMES = ("lookup", "self")
DRAFT_TOKENS = 8  # the most of a request in a step, where nothing else is asked for
MOST_ROWS = 128  # for the drafts of a step: a row of logits each


def check_draft(draft: str | os.PathLike[str] | None) -> str | None:
    """A drafter's name or an artifact's path. Raises ResourceError where it is neither."""
    if draft is None or (isinstance(draft, str) and draft in NAMES):
        return draft
    if isinstance(draft, str | os.PathLike):
        path = os.fspath(draft)
        if isinstance(path, str) and path and "\0" not in path and os.path.isdir(path):
            return path
    todo = "Use 'lookup', 'self' (of an artifact compiled with --draft) or the path of another artifact"
    raise ResourceError(f"draft = {shown(draft)}", where="load", todo=todo)


def check_acceptance(acceptance: Acceptance | None, draft: str | None) -> Acceptance:
    """None: exact. Raises ResourceError where it is none, and where nothing drafts."""
    if acceptance is None:
        return "exact"
    if not isinstance(acceptance, str) or acceptance not in ("exact", "rejection"):
        what = f"acceptance = {shown(acceptance)}"
        raise ResourceError(what, where="load", todo="Use 'exact' or 'rejection'")
    check_drafts("acceptance", draft)
    return acceptance


def check_drafts(option: str, draft: str | None) -> None:
    """Of an option that says how to draft. Raises ResourceError where nothing does."""
    if draft is None:
        todo = "Choose draft = 'lookup', 'self' or the path of another artifact, or leave it out"
        raise ResourceError("nothing drafts here", where=option, todo=todo)


def draft_rows(max_draft_tokens: int, max_step_tokens: int, max_requests: int) -> int:
    """How many drafts a step may have."""
    return min(MOST_ROWS, max_requests * max_draft_tokens, max_step_tokens - 1)
