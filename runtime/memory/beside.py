"""What another artifact takes that drafts beside the target: its blocks are for as many tokens as the
target's, and where a share of the memory was to be filled with blocks, both fit into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from runtime import machine
from runtime.artifact import Artifact
from runtime.cpu.memory import count_workspace
from runtime.cpu.plan import Plan
from runtime.kv.budget import Budget, plan_blocks
from runtime.kv.group import STATE_BLOCKS
from runtime.limits import Limits
from runtime.manifest import KVGroup
from runtime.memory.options import Options
from runtime.memory.plan import DraftMemory, GroupMemory, MemoryPlan

Planned = Callable[[Options, DraftMemory], MemoryPlan]


def engine_limits(limits: Limits) -> Limits:
    """Of the steps of a model that drafts, where the target's are these."""
    return Limits(limits.max_step_tokens, limits.max_requests, 0)


def plan_beside(drafter: Artifact, options: Options, planned: Planned) -> MemoryPlan:
    """The plan of a target for the CPU with its drafter. planned: of the target, by options and what
    the drafter takes."""
    alone = _without_blocks(drafter, options)
    plan, budget = planned(options, alone), options.budget
    if budget.blocks is None and budget.num_bytes is None and plan.kv_budget is not None:
        context = plan.max_context
        own, others = _token_bytes(plan.groups, context), _token_bytes(drafter.manifest.kv_groups, context)
        part = Budget(num_bytes=int(plan.kv_budget * own / max(1.0, own + others)))
        plan = planned(replace(options, budget=part), alone)
    tokens = min([_tokens(group, plan.max_context) for group in plan.groups if not group.tail], default=0)
    return replace(plan, draft=_with_blocks(drafter, alone, options.limits, tokens))


def _without_blocks(drafter: Artifact, options: Options) -> DraftMemory:
    """Weights and workspace."""
    manifest, target = drafter.manifest, drafter.cpu
    arena = Plan.parse(drafter.read(target.plan), target.plan)
    threads = machine.default_threads() if options.threads is None else options.threads
    limits = engine_limits(options.limits)
    work = count_workspace(arena, limits, manifest.model, manifest.kv_groups, threads)
    return DraftMemory(manifest.files[drafter.weights()].bytes, work)


def _with_blocks(drafter: Artifact, alone: DraftMemory, limits: Limits, tokens: int) -> DraftMemory:
    """With blocks for so many tokens, and one of each group at least."""
    groups, context = drafter.manifest.kv_groups, drafter.manifest.model.max_context
    num_bytes = int(tokens * _token_bytes(groups, context))
    found = plan_blocks(groups, engine_limits(limits), context, None, num_bytes)
    blocks = tuple(max(1, count) for count in found)
    kv_bytes = sum(count * group.block_bytes for count, group in zip(blocks, groups, strict=True))
    return replace(alone, kv_bytes=kv_bytes, blocks=blocks)


def _token_bytes(groups: Sequence[KVGroup | GroupMemory], context: int) -> float:
    """Of a token that all groups keep, in whole blocks; of a state, its part of what a request of the whole
    context takes."""
    tokens = [context / STATE_BLOCKS if group.state else group.block for group in groups]
    return sum(g.block_bytes / count for g, count in zip(groups, tokens, strict=True) if not g.tail)


def _tokens(group: GroupMemory, context: int) -> int:
    """As many as its blocks are for; of a state, those of requests of the whole context."""
    return group.blocks * context // STATE_BLOCKS if group.state else group.blocks * group.block
