"""Speed and memory of a chat: what /stats shows, and the line after an answer."""

from __future__ import annotations

from typing import Any

from compiler.cli.chat.session import Session, Turn
from runtime.memory.table import in_units


def of_turn(turn: Turn) -> dict[str, Any]:
    """What --json says of an answer, beside its text. Seconds since it was asked for."""
    completion = turn.completion
    return {
        "finish_reason": completion.finish_reason,
        "full": turn.full,
        "prompt_tokens": len(completion.prompt_token_ids),
        "cached_tokens": completion.cached_tokens,
        "output_tokens": len(completion.token_ids),
        "tokens_per_s": None if turn.tokens_per_s is None else round(turn.tokens_per_s, 2),
        "first_token_s": completion.timings.first_token_s,
        "total_s": completion.timings.total_s,
        "seed": completion.seed,
    }


def line(turn: Turn) -> str:
    """`42 tokens, 38.1 tokens/s, first after 0.12 s, 320 of 345 prompt tokens reused`."""
    completion = turn.completion
    first_s = completion.timings.first_token_s
    parts = [count(len(completion.token_ids), "token")]
    if turn.tokens_per_s is not None:
        parts.append(f"{turn.tokens_per_s:.1f} tokens/s")
    if first_s is not None:
        parts.append(f"first after {first_s:.2f} s")
    parts.append(f"{completion.cached_tokens:,} of {len(completion.prompt_token_ids):,} prompt tokens reused")
    return ", ".join(parts)


def ending(turn: Turn, settings_max: int | None, timeout: float | None) -> str:
    """Why an answer ended where it did not end by itself; else nothing."""
    reason = turn.completion.finish_reason
    if not turn.completion.token_ids:
        return "stopped before a token came: the message is taken back" if reason != "stop" else ""
    if turn.full:
        return "the context is full: /undo takes the last turn back, /clear begins anew"
    return {
        "cancelled": "stopped; the conversation keeps what came",
        "timeout": f"cut off after {timeout} s, as timeout says",
        "length": f"cut off after {settings_max} tokens, as max_new_tokens says",
    }.get(reason, "")


def figures(session: Session) -> dict[str, Any]:
    """Of the last answer, of all since the chat began, and of the engine now."""
    stats, memory = session.engine.stats(), session.engine.memory
    group_bytes = [group.block_bytes for group in memory.groups] if memory is not None else []
    turns = session.turns
    return {
        "last": of_turn(turns[-1]) if turns else None,
        "turns": session.conversation.num_turns,
        "context_tokens": session.num_tokens,
        "max_context": session.engine.model.max_context,
        "answers": len(turns),
        "prompt_tokens": sum(len(turn.completion.prompt_token_ids) for turn in turns),
        "cached_tokens": sum(turn.completion.cached_tokens for turn in turns),
        "output_tokens": sum(len(turn.completion.token_ids) for turn in turns),
        "computed_tokens": stats.computed_tokens,
        "evicted_blocks": stats.evicted_blocks,
        "blocks_cached": stats.blocks_cached,
        "blocks_total": stats.blocks_total,
        "kv_cached_bytes": sum(map(int.__mul__, stats.blocks_cached, group_bytes)),
        "kv_bytes": sum(map(int.__mul__, stats.blocks_total, group_bytes)),
    }


def lines(found: dict[str, Any]) -> str:
    """figures() for people."""
    last = found["last"]
    said = [] if last is None else [f"last answer: {_last(last)}"]
    share = 100 * found["cached_tokens"] / max(found["prompt_tokens"], 1)
    evicted = found["evicted_blocks"]
    return "\n".join(
        [
            *said,
            f"conversation: {count(found['turns'], 'turn')}, {found['context_tokens']:,} of "
            f"{found['max_context']:,} tokens of context",
            f"{count(found['answers'], 'answer')}: {count(found['output_tokens'], 'token')}; "
            f"{found['cached_tokens']:,} of {found['prompt_tokens']:,} prompt tokens cached ({share:.0f}%)",
            f"KV cache: {_blocks(found['blocks_cached'])} of {_blocks(found['blocks_total'])} blocks hold "
            f"earlier turns, {in_units(found['kv_cached_bytes'])} of {in_units(found['kv_bytes'])}"
            + (f"; {evicted} blocks were evicted" if evicted else ""),
        ]
    )


def _last(last: dict[str, Any]) -> str:
    speed = "" if last["tokens_per_s"] is None else f" at {last['tokens_per_s']:.1f} tokens/s"
    first = "" if last["first_token_s"] is None else f", the first after {last['first_token_s']:.2f} s"
    return (
        f"{count(last['output_tokens'], 'token')}{speed}{first}; {last['cached_tokens']:,} of "
        f"{last['prompt_tokens']:,} prompt tokens cached, seed {last['seed']}"
    )


def _blocks(counts: list[int]) -> str:
    return " and ".join(f"{count:,}" for count in counts)


def count(number: int, noun: str) -> str:
    """`1 turn`, `2,000 turns`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
