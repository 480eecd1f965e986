"""KV blocks of 8, 16, 32 and 64 tokens under Triton's interpreter: close to float64, and in their slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from codegen.kv_block import BLOCKS, block_bytes
from ir.interpret import empty_kv
from tests.codegen.harness import Array, Chunk, aligned, reference_step
from tests.codegen.test_block_sizes import POOL_TOKENS, STRIDE, case, check_slots, graph, requests
from tests.triton.harness import TritonModel


def run(model: TritonModel, steps: Sequence[Sequence[Chunk]]) -> tuple[list[Array], list[Array]]:
    """The rows of each step, [tokens, block sizes, width], and the caches after them."""
    cache = [aligned(POOL_TOKENS // kv.block * block_bytes(kv), np.uint8, 255) for kv in model.states]
    found = [model.step(cache, chunks, stride=STRIDE) for chunks in steps]
    return [rows.reshape(len(rows), len(BLOCKS), -1) for rows in found], cache


@pytest.mark.parametrize("invariant", [False, True])
def test_every_block_size_is_close_to_float64(tmp_path: Path, invariant: bool) -> None:
    model = TritonModel(graph(case(0)), None, tmp_path, invariant=invariant)
    batch = requests(9, 130, 66, 17)
    steps = [
        [r.chunk(0, len(r.ids) - 1) for r in batch],
        [r.chunk(len(r.ids) - 1, len(r.ids)) for r in batch],  # the decode kernel's
    ]
    states = [empty_kv(kv, POOL_TOKENS // kv.block) for kv in model.states]
    for step, got in zip(steps, run(model, steps)[0], strict=True):
        want, states = reference_step(model.graph, model.weights, states, step)
        assert np.abs(got - want.reshape(got.shape)).max() < 2e-5 * want.std()
        assert (got == got[:, :1]).all()


def test_keys_and_values_lie_in_their_slots(tmp_path: Path) -> None:
    model = TritonModel(graph(case(1)), None, tmp_path)
    (request,) = requests(131)
    _, caches = run(model, [[request.chunk(0, 40)], [request.chunk(40, 131)]])
    check_slots(model, request, caches)
