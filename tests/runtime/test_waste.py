"""The trace of 200 requests leaves hardly a KV slot unused, whatever the model computes."""

from __future__ import annotations

import numpy as np
import pytest

from pagingbench import trace, waste
from runtime.engine import Engine
from runtime.executor import Sampled
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.limits import Limits
from runtime.manifest import Model


class IdleExecutor:
    """Computes nothing: every token is 1."""

    target = "idle"

    def forward(self, step):
        return np.zeros((len(step.rows), 1), np.float32)

    def sample(self, logits, args):
        rows, none = len(logits), np.zeros((len(logits), 0))
        return Sampled(np.ones(rows, np.int32), np.zeros(rows, np.float32), none, none)

    def copy_blocks(self, group, pairs):
        raise AssertionError("nothing is shared")

    def close(self):
        pass


def idle_engine(blocks: int, block: int = 16) -> Engine:
    cache = Cache([Group(blocks)], block=block)
    return Engine(IdleExecutor(), Model("f32", 49152, 8192, None, ()), cache, Limits())


def test_the_trace_is_long_tailed():
    lengths = trace.read()
    assert len(lengths) == 200
    for values, most in (([e.prompt for e in lengths], 1000), ([e.output for e in lengths], 500)):
        assert 1 <= min(values) <= 16 and most * 0.8 < max(values) <= most
        assert np.mean(values) > 1.2 * np.median(values)


def test_waste_is_below_four_percent():
    with idle_engine(waste.BLOCKS) as engine:
        found = waste.measure(engine, trace.read(), 0)
    assert found.holds, found.json
    assert found.figures["steps while requests wait"] > 0.75 * found.figures["steps"]
    assert found.figures["mean waste of contiguous pieces of prompt and new tokens"] > 0.2
    assert found.figures["mean waste of contiguous pieces of the context"] > 0.9


@pytest.mark.parametrize("block", [8, 32, 64])
def test_half_a_block_of_each_request_is_unused(block):
    """The lengths are spread evenly over a block, so that half of the last one is: the waste is known."""
    with idle_engine(waste.BLOCKS * 16 // block, block) as engine:
        watch = waste.Watch(8192)
        waste.after_steps(engine, watch)
        rng = np.random.default_rng(1)
        waste.complete(
            [engine.submit(waste.random_prompt(engine, rng, 40 + i), waste.fixed(64)) for i in range(64)]
        )
    unused = [(s.allocated - s.used) / s.running for s in watch.found if s.running > 8]
    assert np.mean(unused) == pytest.approx((block - 1) / 2, rel=0.1)
