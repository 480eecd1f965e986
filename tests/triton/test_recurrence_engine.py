"""A model of two recurrences around an attention through a whole engine, on Triton's interpreter: tokens are
those of the imported graph in float64, whatever is shared, drafted, put aside and computed in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ir.graph import Graph
from ir.interpret import interpret
from passes.page_kv import PageKv
from passes.select_rows import SelectRows
from runtime import Sampling
from runtime.engine import Engine
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.log import Log
from runtime.manifest import Model
from runtime.sequence import Sequence
from runtime.speculation.pace import Pace
from runtime.speculation.speculation import Speculation
from tests.codegen.harness import Array
from tests.passes.test_page_kv import VOCAB, hybrid
from tests.runtime.drafters import OracleDrafter
from tests.triton.harness import TritonModel
from tests.triton.test_executor import opened

CONTEXT = 40
ABOUT = Model("f32", VOCAB, CONTEXT, None, ())


@dataclass
class Made:
    imported: Graph
    weights: dict[str, Array]
    model: TritonModel

    def continued(self, ids: list[int], count: int) -> list[int]:
        """The likeliest tokens after a prompt, in float64 and without a cache."""
        tokens = list(ids)
        for _ in range(count):
            inputs = {"ids": np.array([tokens]), "pos": np.arange(len(tokens))[None]}
            run = interpret(self.imported, inputs, self.weights, np.float64)
            tokens.append(int(run.outputs[0][0, -1].argmax()))
        return tokens[len(ids) :]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    imported = hybrid()
    rng = np.random.default_rng(3)
    weights = {w.name: rng.normal(size=w.type.shape, scale=0.3).astype(np.float32) for w in imported.weights}  # type: ignore[union-attr]
    paged = SelectRows().run(PageKv().run(imported).graph).graph
    return Made(imported, weights, TritonModel(paged, weights, tmp_path_factory.mktemp("recurrent")))


def engine_of(
    made: Made, folder: Path, blocks: tuple[int, int] = (12, 12), places: int = 0, drafts: bool = False
) -> Engine:
    """blocks: of the state, and of keys and values."""
    limits = Limits(max_step_tokens=24, max_requests=4, score_rows=0, draft_rows=16 if drafts else 0)
    executor = opened(made.model, folder, about=ABOUT, limits=limits, num_blocks=blocks, swap_blocks=places)
    cache = Cache([Group(blocks[0], state=True), Group(blocks[1])], log=Log())

    def to_come(seq: Sequence) -> list[int]:
        prompt = seq.ids[: seq.prompt_tokens].tolist()
        return made.continued(prompt, CONTEXT - len(prompt))

    drafter = OracleDrafter(to_come, VOCAB, np.random.default_rng(1))
    swap = Swap(cache, places, limits.max_requests)
    speculation = Speculation(drafter, Pace(4, share=0.0), VOCAB, cache.log, "exact") if drafts else None
    return Engine(executor, ABOUT, cache, limits, swap=swap, speculation=speculation)


PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (33, 17, 15, 1)]


@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_are_the_references(made: Made, tmp_path: Path, drafts: bool) -> None:
    """Prompts in chunks beside others' tokens; drafts of which some are wrong."""
    with engine_of(made, tmp_path, drafts=drafts) as engine:
        sampling = Sampling(max_new_tokens=7, draft_tokens=4)
        requests = [engine.submit(ids, sampling) for ids in PROMPTS]
        for ids, request in zip(PROMPTS, requests, strict=True):
            assert request.result().token_ids == made.continued(ids, 7)
        stats = engine.stats()
        assert (0 < stats.accepted_tokens < stats.drafted_tokens) == drafts and not stats.draft_failures


def test_a_repeated_prompt_goes_on_from_a_kept_state(made: Made, tmp_path: Path) -> None:
    ids = PROMPTS[0]
    with engine_of(made, tmp_path) as engine:
        first = engine.submit(ids, Sampling(max_new_tokens=4)).result()
        again = engine.submit(ids, Sampling(max_new_tokens=4)).result()
        hits = engine.stats().prefix_hit_tokens
    assert first.token_ids == again.token_ids == made.continued(ids, 4)
    assert hits == 32


def test_a_fork_goes_on_from_its_parents_state(made: Made, tmp_path: Path) -> None:
    ids = PROMPTS[1]
    with engine_of(made, tmp_path) as engine:
        parent = engine.submit(ids, Sampling(max_new_tokens=5))
        tokens = parent.result().token_ids
        child = engine.fork(parent, Sampling(max_new_tokens=4), append=[3], keep=4)
        assert child.result().token_ids == made.continued([*ids, *tokens[:4], 3], 4)


def test_a_preempted_request_goes_on(made: Made, tmp_path: Path) -> None:
    """Too few blocks of keys for both: one is put aside with its state."""
    with engine_of(made, tmp_path, blocks=(8, 3), places=8) as engine:
        prompts = [PROMPTS[2], PROMPTS[1][:14]]
        requests = [engine.submit(ids, Sampling(max_new_tokens=5)) for ids in prompts]
        for ids, request in zip(prompts, requests, strict=True):
            assert request.result().token_ids == made.continued(ids, 5)
        assert engine.stats().swapped_blocks > 0
