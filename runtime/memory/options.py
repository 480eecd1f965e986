"""What load() is given that decides on memory, and a place's memory divided by it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from runtime import machine
from runtime.errors import ResourceError, shown
from runtime.kv.budget import Budget, most_swap_blocks, plan_blocks
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.memory.plan import DraftMemory, MemoryPlan, Place, Workspace
from runtime.sampling import MAX_DRAFT_TOKENS
from runtime.speculation.choose import DRAFT_TOKENS, check_draft, check_drafts, draft_rows


@dataclass(frozen=True)
class Options:
    """threads: None for the cores here. draft: a drafter's name or an artifact's path; None: nothing is
    drafted."""

    limits: Limits
    budget: Budget
    swap_bytes: int
    threads: int | None = None
    draft: str | None = None
    max_draft_tokens: int = DRAFT_TOKENS

    @staticmethod
    def of(
        kv_blocks: int | None,
        kv_memory: int | str | None,
        max_step_tokens: int | None,
        max_requests: int | None,
        swap_memory: int | str,
        threads: int | None = None,
        draft: str | os.PathLike[str] | None = None,
        max_draft_tokens: int | None = None,
    ) -> Options:
        """Raises ResourceError for a value that is none."""
        step_tokens = _count("max_step_tokens", max_step_tokens, Limits.max_step_tokens)
        requests = _count("max_requests", max_requests, Limits.max_requests)
        drafter = check_draft(draft)
        draft_tokens = _count("max_draft_tokens", max_draft_tokens, DRAFT_TOKENS, MAX_DRAFT_TOKENS)
        if max_draft_tokens is not None:
            check_drafts("max_draft_tokens", drafter)
        rows = 0 if drafter is None else draft_rows(draft_tokens, step_tokens, requests)
        limits = Limits(step_tokens, requests, draft_rows=rows)
        threads = None if threads is None else _count("threads", threads, 1)
        budget = Budget.of(kv_blocks, kv_memory)
        swap_bytes = machine.parse_bytes(swap_memory, "swap_memory")
        return Options(limits, budget, swap_bytes, threads, drafter, draft_tokens)

    def plan(
        self,
        target: str,
        place: Place,
        model: Model,
        groups: Sequence[KVGroup],
        weight_bytes: int | None,
        workspace: Workspace,
        unknown: Sequence[str] = (),
        draft: DraftMemory | None = None,
    ) -> MemoryPlan:
        """What does not fit is planned all the same: MemoryPlan.check() says so. Raises ResourceError where
        the slots of so many blocks cannot be numbered."""
        swap_blocks = most_swap_blocks(groups, self.swap_bytes, self.limits)
        planned = partial(
            MemoryPlan.of,
            groups,
            target=target,
            place=place,
            limits=self.limits,
            max_context=model.max_context,
            weight_bytes=weight_bytes,
            workspace=workspace,
            swap_blocks=swap_blocks,
            unknown=tuple(unknown),
            draft=draft,
        )
        held, free = planned([0] * len(groups)).total_bytes, place.free_bytes
        kv_bytes = self.budget.within(None if free is None else free - held, place.percent)
        counts = plan_blocks(groups, self.limits, model.max_context, self.budget.blocks, kv_bytes)
        return planned(counts, kv_budget=kv_bytes if self.budget.blocks is None else None)


def _count(name: str, value: int | None, default: int, most: int = 2**20) -> int:
    """The value or, where none is given, the default."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        what, todo = f"{name} = {shown(value)}", f"Use an integer from 1 to {most}"
        raise ResourceError(what, where="load", todo=todo)
    return value
