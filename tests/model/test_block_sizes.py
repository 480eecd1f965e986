"""A tiny model compiled with each KV block size: the reference's logits, and the same bits for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import runtime
from codegen.kv_block import BLOCKS
from compiler.cli import bench, inspect
from compiler.errors import CompileError
from runtime.artifact import Artifact
from tests.model import tiny
from tests.model.harness import Stepper

MODEL = "mistral"  # whose window is no multiple of any block
LENGTHS = (5, 61, 100)
CUTS = (0, 3, 9, 41, 64, 65, 66, 100)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """An artifact for each block size, the pass by pass check of the largest one included."""
    folder = tmp_path_factory.mktemp("blocks")
    source = tiny.save(MODEL, folder / "checkpoint")
    return {
        block: tiny.compiled(source, folder / f"{block}.octavo", block=block, check=block == max(BLOCKS))
        for block in BLOCKS
    }


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[int(i) for i in rng.integers(3, tiny.VOCAB, n)] for n in LENGTHS]


def by_block(engines: dict[int, Path], run: Callable[[Stepper], np.ndarray]) -> np.ndarray:
    """What a run gives for each block size, [block sizes, ...]."""
    return np.stack([run(Stepper(engine, tiny.CONTEXT)) for engine in engines.values()])


def test_logits_are_the_references_and_the_same_bits(
    engines: dict[int, Path], prompts: list[list[int]]
) -> None:
    ids = prompts[-1]
    whole = by_block(engines, lambda stepper: stepper.logits(ids))
    want = tiny.reference_logits(tiny.build(MODEL), ids).numpy()
    assert np.abs(whole - want).max() < 1e-4 * want.std()
    assert (whole == whole[0]).all()
    chunks = [ids[a:b] for a, b in zip(CUTS[:-1], CUTS[1:], strict=True)]
    assert (by_block(engines, lambda stepper: stepper.run(chunks)) == whole[0]).all()


def test_batches_have_the_same_bits(engines: dict[int, Path], prompts: list[list[int]]) -> None:
    first = [(r, 0, n // 2) for r, n in enumerate(LENGTHS)]
    rest = [(r, n // 2, n) for r, n in reversed(list(enumerate(LENGTHS)))]
    found = by_block(engines, lambda stepper: np.concatenate(stepper.batch(prompts, [first, rest])))
    alone = [Stepper(engines[16], tiny.CONTEXT).logits(ids) for ids in prompts]
    assert (found == np.concatenate(alone)).all()


def test_forks_copy_a_block_and_prefixes_are_found_in_whole_blocks(
    engines: dict[int, Path], prompts: list[list[int]]
) -> None:
    """The engine's own bookkeeping, by block size, over the compiled copies of blocks."""
    sampling = runtime.Sampling(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    found: dict[int, list[list[int]]] = {}
    for block, path in engines.items():
        with runtime.load(path, threads=1) as engine:
            samples = runtime.generate(engine, prompts[1], replace(sampling, n=3))
            again = engine.submit(prompts[1], sampling).result()
        assert isinstance(samples, list)
        found[block] = [c.token_ids for c in (*samples, again)]
        assert again.cached_tokens == {8: 56, 16: 48, 32: 32, 64: 0}[block]
    assert all(tokens == found[16] for tokens in found.values())
    assert len({tuple(tokens) for tokens in found[16]}) == 3


def test_bench_and_inspect_know_the_block_size(engines: dict[int, Path]) -> None:
    for block, engine in engines.items():
        assert [g["block"] for g in inspect.summary(Artifact.open(engine))["kv_groups"]] == [block]
        with pytest.raises(CompileError, match=f"must be a multiple of {block}, "):
            bench.command(engine, context_tokens=block * 3 // 2)
