"""What an engine, its statistics, its log and its requests say of themselves when they are printed."""

from __future__ import annotations

import pytest

from runtime import Sampling
from tests.runtime.fake import BLOCK, fake_engine


def test_every_line_of_the_log_has_the_request_the_unit_and_the_cause():
    with fake_engine() as engine:
        first = engine.submit(list(range(40)), Sampling(max_new_tokens=2))
        first.result()
        second = engine.submit(list(range(40)), Sampling(max_new_tokens=2))
        second.result()
        with engine.pin(list(range(40))):
            pass
        late = engine.submit(list(range(40)), Sampling(max_new_tokens=200), timeout_s=1e-9)
        late.result()
        lines = [str(entry).partition(" s, ")[2] for entry in engine.log()]
    hit = f"request {second.number}, sample 0: prefix_hit, {40 // BLOCK * BLOCK} tokens: the first of its 40"
    assert hit in lines and first.number != second.number
    assert f"request 2, sample 0: pin, {40 // BLOCK} blocks: engine.pin" in lines
    assert f"request {late.number}, sample 0: timeout, 0 tokens: timeout_s = 1e-09" in lines
    assert all(": " in line.partition("sample 0: ")[2] for line in lines)  # a cause


def test_one_block_is_one_block():
    with fake_engine(kv_blocks=3) as engine:
        for first in (0, 40):
            engine.submit(list(range(first, first + 40)), Sampling(max_new_tokens=2)).result()
        lines = [str(entry) for entry in engine.log()]
    assert any(
        line.endswith(": evict, 1 block: it needs one, and in group 0 only cached ones are free")
        for line in lines
    )


def test_the_log_goes_on_from_a_number():
    with fake_engine() as engine:
        for _ in range(3):
            engine.submit(list(range(40)), Sampling(max_new_tokens=2)).result()
        entries = engine.log()
        assert [entry.number for entry in entries] == list(range(len(entries))) and len(entries) == 2
        assert engine.log(since=1) == entries[1:] and engine.log(since=2) == []


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_statistics_are_printed_with_a_line_for_each_group(windows):
    with fake_engine(windows=windows) as engine:
        engine.submit(list(range(40)), Sampling(max_new_tokens=3)).result()
        engine.submit(list(range(40)), Sampling(max_new_tokens=3)).result()
        stats = engine.stats()
        lines = str(stats).splitlines()
    assert len(lines) == 4 + len(windows)
    assert f"{stats.steps} steps on " in lines[0] and "6 given" in lines[0]
    assert "2 samples finished, 0 requests failed" in lines[1]
    assert f"1 prefix hits of {stats.prefix_hit_tokens} tokens" in lines[2]
    assert lines[-1].startswith(f"KV group {len(windows) - 1}: {stats.blocks_total[-1]} blocks, ")


def test_requests_and_prefixes_say_what_they_are():
    with fake_engine() as engine:
        request = engine.submit(list(range(40)), Sampling(max_new_tokens=2, n=2))
        request.results()
        assert repr(request) == "<Request 0: 40 prompt tokens, 2 samples, done>"
        with engine.pin(list(range(40))) as prefix:
            assert repr(prefix) == f"<Prefix of {40 // BLOCK * BLOCK} tokens, ready>"
        total = engine.stats().blocks_total[0]
        assert f"{total} blocks of {BLOCK} tokens" in repr(engine)
