"""An artifact compiled from a graph that is off by one in its window or in its rotation gives other logits.

test_architectures shifts positions, lengths and slots of the steps that run; here the compiled code itself is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import compiler.forward
from compiler.pipeline import pipeline
from ir.graph import Graph, Op
from ir.predicates import CAUSAL, KEY, QUERY, window, window_of
from passes.base import Pass, Result
from tests.model import tiny
from tests.model.forced import NOTICED, PROMPT_LENGTHS, Forced
from tests.model.harness import Stepper

Change = Callable[[Op], Op]


@dataclass(frozen=True)
class Mutate(Pass):
    """Wrong on purpose: every op of a kind is changed."""

    change: Change

    def run(self, graph: Graph) -> Result:
        ops = tuple(self.change(op) for op in graph.ops)
        assert ops != graph.ops
        return Result(replace(graph, ops=ops), 1)


def wider_window(op: Op) -> Op:
    size = window_of(op.attrs["mask"]) if op.kind == "attention" else None
    return op if size is None else op.with_attrs(mask=CAUSAL & window(size + 1))


def own_key_hidden(op: Op) -> Op:
    """A query sees the keys before its own alone, and the first its own."""
    return (
        op.with_attrs(mask=(KEY < QUERY) | ((KEY <= QUERY) & (QUERY < 1))) if op.kind == "attention" else op
    )


def rotation_one_pair_off(op: Op) -> Op:
    return op.with_attrs(interleaved=not op.attrs.get("interleaved", False)) if op.kind == "rope" else op


CASES = [
    ("mistral", wider_window),
    ("gemma2", wider_window),
    *((name, own_key_hidden) for name in ("llama", "gpt2", "cohere", "opt")),
    *((name, rotation_one_pair_off) for name in ("llama", "phi", "cohere", "stablelm")),
]


@pytest.mark.parametrize(("name", "change"), CASES, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_a_wrong_graph_is_noticed(
    name: str, change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **options: Any) -> tuple[Pass, ...]:
        passes = list(pipeline(*args, **options))
        index = next(i for i, each in enumerate(passes) if each.name == "page_kv")
        return (*passes[:index], Mutate(change), *passes[index:])

    monkeypatch.setattr(compiler.forward, "pipeline", wrong)
    model = tiny.build(name)
    model.save_pretrained(tmp_path / "checkpoint")
    out = tiny.compiled(tmp_path / "checkpoint", tmp_path / "m.octavo")
    case = Forced(Stepper(out, tiny.CONTEXT), model)
    lengths = PROMPT_LENGTHS if change is not wider_window else [n for n in PROMPT_LENGTHS if n > tiny.WINDOW]
    for length in lengths:
        assert case.worst(length) > NOTICED, length
