"""The memory plan: its numbers by hand, what fits at once, and refusals before anything is taken."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from runtime import MemoryPlan, RequestError, ResourceError, Sampling, machine
from runtime.kv.budget import Budget, plan_blocks
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.memory.options import Options
from runtime.memory.plan import Place, Workspace
from tests.runtime.fake import fake_engine

# 4 layers of k and v, 2 heads of 8, f32: 4 * 2 * 2 * 8 * 4 = 512 bytes a token, 8192 a block of 16
FULL, WINDOW = KVGroup(4, None, 16, 8192, 512), KVGroup(2, 64, 16, 4096, 256)
LIMITS = Limits(max_step_tokens=32, max_requests=4)
MODEL = Model("f32", 100, 1024, None, ())
WORK = Workspace(arena=1000, logits=2000, sampler=300, inputs=40)


def planned(
    free=10**9, groups=(FULL, WINDOW), *, host=None, kv_blocks=None, kv_memory=None, swap_memory=0
) -> MemoryPlan:
    options = Options.of(kv_blocks, kv_memory, 32, 4, swap_memory)
    return options.plan("cpu", Place("the host", free, host), MODEL, groups, 5000, WORK)


def test_memory_is_shared_by_need():
    # one request of 1024 tokens: 64 blocks in the full group; (64 + 32 + 14) / 16 + 1 = 7 in the window group
    one = 64 * 8192 + 7 * 4096
    assert plan_blocks([FULL, WINDOW], LIMITS, 1024, None, one) == [64, 7]
    assert plan_blocks([FULL, WINDOW], LIMITS, 1024, None, 2**30) == [4 * 64, 4 * 7]
    assert plan_blocks([FULL, WINDOW], LIMITS, 1024, None, None) == [4 * 64, 4 * 7]
    assert plan_blocks([FULL, WINDOW], LIMITS, 1024, 9, None) == [9, 9]
    assert plan_blocks([FULL], LIMITS, 1024, None, 10 * 8192 + 5) == [10]


# SmolLM2: 30 layers of k and v, 3 heads of 64. Codes and f16 scales; int4's and int2's keys share a scale and
# a minimum by channel over 64 tokens, their values by token.
HEADS = 30 * 2 * 3
CACHES = {
    "f32": [KVGroup(30, None, 16, 16 * HEADS * 256, HEADS * 256)],
    "int8": [KVGroup(30, None, 16, 16 * HEADS * 66, HEADS * 66)],
    "int4": [KVGroup(30, None, 64, 64 * HEADS * 36, HEADS * 36)],
    "int2": [KVGroup(30, None, 64, 64 * HEADS * 20, HEADS * 20)],
}
TAIL = KVGroup(30, None, 64, 64 * HEADS * 128, HEADS * 128, tail=True)  # bf16


def cache_plan(format: str, kv_memory: int) -> MemoryPlan:
    groups = CACHES[format] + [TAIL] * (format in ("int4", "int2"))
    options = Options.of(None, kv_memory, 512, 16, 0)
    return options.plan("cpu", Place("the host", None), replace(MODEL, max_context=8192), groups, 0, WORK)


@pytest.mark.parametrize(("format", "times"), [("f32", 1), ("int8", 3.5), ("int4", 6.5), ("int2", 9)])
def test_a_quantised_cache_holds_so_many_times_the_tokens(format, times):
    """16 requests of 4,096 tokens, in as much less memory, scales and tails included."""
    kv_bytes = 16 * 4096 * HEADS * 256
    plan = cache_plan(format, int(kv_bytes / times))
    assert plan.concurrent(4096) == 16 and plan.kv_bytes <= kv_bytes / times
    assert cache_plan(format, int(kv_bytes / times / 1.3)).concurrent(4096) < 16
    assert plan.as_json()["kv_bytes_per_token"] == CACHES[format][0].bytes_per_token


def test_a_tail_has_a_block_for_each_request_and_those_of_a_step():
    assert cache_plan("int4", 2**33).num_blocks[1] == 16 + 512 // 64
    assert plan_blocks([*CACHES["int4"], TAIL], Limits(512, 16), 8192, 100, None) == [100, 24]
    assert plan_blocks([*CACHES["int4"], TAIL], Limits(512, 16), 8192, 7, None) == [7, 7]


# 4 layers of 16 tokens' inputs and a state, of which a request needs 2 blocks, and 2 are for prefix hits
STATE = KVGroup(4, None, 16, 65536, 0, state=True)
SHORT = 64  # a context of 4 blocks


@pytest.mark.parametrize(
    ("groups", "context", "blocks", "num_bytes", "counts"),
    [
        ([FULL, STATE], 1024, None, None, [4 * 64, 4 * 4]),
        ([FULL, STATE], 1024, 9, None, [9, 9]),
        ([FULL, STATE], 1024, 100, None, [100, 16]),
        ([FULL, STATE], 1024, None, 2**22, [4 * 64, 16]),
        # half of what there is for each
        ([FULL, STATE], 1024, None, 20 * 65536, [80, 10]),
        # and what the other cannot use: 16 blocks of 8192 bytes are all that it needs
        ([STATE, FULL], SHORT, None, 10 * 65536, [8, 16]),
        ([STATE], 1024, None, 5 * 65536 + 9, [5]),
        # what one request needs goes before half
        ([FULL, STATE], 1024, None, 3 * 65536, [8, 2]),
        ([FULL, STATE], 1024, None, 2 * 65536 - 1, [0, 0]),
        ([STATE], 1024, None, 2 * 65536 - 1, [0]),
    ],
)
def test_a_state_has_two_blocks_for_each_request_and_two_for_hits(groups, context, blocks, num_bytes, counts):
    assert plan_blocks(groups, LIMITS, context, blocks, num_bytes) == counts


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (STATE,), (FULL, STATE), (WINDOW, STATE, FULL)])
def test_the_least_that_a_refusal_names_is_enough_and_a_byte_less_is_not(groups):
    """And what is enough is refused at no number of bytes above it, nor exceeded."""
    two = ", two of a state," if STATE in groups else ""
    least = sum(group.block_bytes * (2 if group.state else 1) for group in groups)
    for num_bytes in (1, least // 2, least - 1):
        with pytest.raises(
            ResourceError, match=rf"one block of every group{two} \({least} bytes; one request"
        ):
            planned(groups=groups, kv_memory=num_bytes).check()
    for num_bytes in range(least, 9 * least, 4096):
        plan = planned(groups=groups, kv_memory=num_bytes)
        plan.check()
        assert plan.kv_bytes <= num_bytes and plan.concurrent(16) >= 1


def test_a_state_takes_no_more_for_more_tokens():
    plan = planned(groups=(FULL, STATE), kv_memory=20 * 65536)
    assert [plan.concurrent(n) for n in (16, 320, 1024)] == [4, 4, 1]
    assert plan.as_json()["kv_bytes_per_token"] == 512
    assert "4 layers, state: 10 blocks of 65,536 bytes" in plan.text()
    assert planned(groups=(STATE,), kv_blocks=5).concurrent(1024) == 2
    with pytest.raises(ResourceError, match="whole context, 1024 tokens, takes 131072"):
        planned(groups=(STATE,), kv_memory=10**5).check()


def test_places_on_the_host_are_fewer_of_states():
    for num_bytes, places in [(3 * 73728, [3, 3]), (4 * 65536 + 9 * 8192, [9, 4])]:
        plan = planned(groups=(FULL, STATE), kv_blocks=10, swap_memory=num_bytes)
        assert plan.swap_places == places and plan.swap_bytes <= num_bytes
    assert planned(groups=(STATE,), kv_blocks=10, swap_memory=10**9).swap_places == [4]
    assert planned(groups=(STATE,), kv_blocks=10).swap_places == [0]
    assert "of every group but states" in planned(groups=(FULL, STATE), swap_memory=10**6).text()


def test_places_on_the_host_are_fewer_of_tails():
    main = CACHES["int4"][0].block_bytes
    for num_bytes, places in [
        (3 * (main + TAIL.block_bytes) + 9, [3, 3]),
        (16 * (main + TAIL.block_bytes), [16, 16]),
        (16 * TAIL.block_bytes + 40 * main, [40, 16]),
    ]:
        options = Options.of(10, None, 512, 16, num_bytes)
        plan = options.plan("cpu", Place("the host", None), MODEL, [*CACHES["int4"], TAIL], 0, WORK)
        assert plan.swap_places == places and plan.swap_bytes <= num_bytes
        assert Swap(Cache([Group(10), Group(10, None, True)]), plan.swap_blocks, 16).places == places


def test_a_tail_takes_a_quarter_of_little_memory():
    kv_bytes = 12 * TAIL.block_bytes
    plan = cache_plan("int4", kv_bytes)
    assert plan.num_blocks == [9 * TAIL.block_bytes // CACHES["int4"][0].block_bytes, 3]
    assert plan.concurrent(64) == 3  # each needs one
    plan.check()
    with pytest.raises(ResourceError, match="do not hold one block of every group"):
        cache_plan("int4", TAIL.block_bytes).check()
    assert "tail" in plan.text()


def test_the_sum_is_of_all_that_is_held():
    plan = planned(kv_blocks=10, swap_memory=3 * (8192 + 4096) + 1)
    assert plan.num_blocks == [10, 10] and plan.swap_blocks == 3
    assert plan.kv_bytes == 10 * (8192 + 4096) and plan.swap_bytes == 3 * (8192 + 4096)
    assert plan.total_bytes == 5000 + 3340 + 13 * (8192 + 4096)


@pytest.mark.parametrize(
    ("option", "want"),
    [(None, 50), ("40%", 40), ("100%", 100), (8192 * 20, None), ("160KiB", None)],
)
def test_a_budget_is_bytes_or_a_share_of_what_is_left(option, want):
    free = 5000 + 3340 + 8192 * 40
    plan = planned(free, (FULL,), kv_memory=option)
    assert plan.num_blocks == [20 if want is None else 40 * want // 100]
    plan.check()


def test_so_many_requests_fit_at_once():
    plan = planned(kv_blocks=20)
    # 100 tokens: 7 blocks, and of the window (64 + 32 + 14) // 16 + 1 = 7; 320: 20 and 7; 321: 21
    assert [plan.concurrent(n) for n in (1, 100, 160, 161, 320, 321)] == [4, 2, 2, 1, 1, 0]
    for length in (0, 1025, True, 1.5):
        with pytest.raises(RequestError, match="length"):
            plan.concurrent(length)


@pytest.mark.parametrize(
    ("windows", "blocks", "step_tokens", "length", "most"),
    [
        # 72 tokens are 5 blocks
        ((None,), 17, 64, 72, 3),
        # and of a window of 9, in steps of 8, (9 + 8 + 14) // 16 + 1 = 2: the full group decides
        ((None, 9), 24, 8, 72, 4),
        # here the window does: 7 // 2
        ((9,), 7, 8, 72, 3),
        # 30 tokens are 2 blocks of a window of 200 as well
        ((200, None), 11, 8, 30, 5),
        # a tail has as many as run
        (("tail",), 17, 64, 72, 3),
        (("tail", 9), 7, 8, 30, 3),
        # of a state two, however long it is
        (("state",), 7, 64, 72, 3),
        (("state", None), 17, 64, 72, 3),
    ],
)
def test_as_many_run_at_once_and_one_more_does_not(windows, blocks, step_tokens, length, most):
    quantized = tuple(g for g, window in enumerate(windows) if window == "tail")
    windows = tuple(None if window == "tail" else window for window in windows)
    states = {"state": KVGroup(1, None, 16, 1024, 0, state=True)}
    groups = [states.get(window) or KVGroup(1, window, 16, 1024, 64) for window in windows]
    groups += [KVGroup(1, None, 16, 1024, 64, tail=True) for _ in quantized]
    plan = MemoryPlan.of(
        groups, [blocks] * len(groups), target="cpu", place=Place("the host", None), max_context=256,
        limits=Limits(step_tokens, 16), weight_bytes=0, workspace=WORK, swap_blocks=0,
    )  # fmt: skip
    assert plan.concurrent(length) == most
    for count in (most, most + 1):
        together, preemptions = run_together(windows, quantized, blocks, step_tokens, length, count)
        if count == most:
            assert together == most and preemptions == 0
        else:
            assert together <= most or preemptions > 0


def run_together(windows, quantized, blocks, step_tokens, length, count) -> tuple[int, int]:
    """Requests that grow side by side to `length` tokens in the cache: the most in one step, preemptions.

    Another's only step runs until all are submitted, so that all begin at once.
    """
    began, submitted = threading.Event(), threading.Event()
    options = dict(kv_blocks=blocks, windows=windows, quantized=quantized, max_step_tokens=step_tokens)
    with fake_engine(**options) as engine:
        executor = engine._executor
        forward = executor.forward
        executor.forward = lambda step: (began.set(), submitted.wait(60)) and forward(step)
        first = engine.submit([9], Sampling(max_new_tokens=1))
        assert began.wait(60)
        sampling = Sampling(max_new_tokens=length - 1, ignore_eos=True)
        requests = [engine.submit([20 + i, 20 + i], sampling) for i in range(count)]
        submitted.set()
        first.result()
        for request in requests:
            assert len(request.result().token_ids) == length - 1
        return max(requests for _, requests in executor.steps), engine.stats().preemptions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(kv_memory=1000), "1000 bytes .* one block of every group .12288 bytes; .* takes 552960"),
        (
            dict(kv_blocks=1000),
            "97.7 KiB of memory free; this takes 11.7 MiB: weights 4.9 KiB, .*Lower kv_m",
        ),
        (dict(kv_blocks=1, swap_memory="1MiB"), "Lower swap_memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(options, said):
    plan = planned(100_000, **options)
    with pytest.raises(ResourceError, match=said):
        plan.check()
    assert (
        plan.refusal
        and plan.refusal in str(plan) == plan.text()
        and plan.as_json()["refusal"] == plan.refusal
    )


def test_swapped_blocks_of_a_device_are_the_hosts():
    plan = planned(100_000, host=8000, kv_blocks=1, swap_memory="1MiB")
    assert plan.total_bytes == 5000 + 3340 + 12288
    with pytest.raises(ResourceError, match="the host has 7.8 KiB of memory free; swap takes 1,020.0 KiB"):
        plan.check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(kv_blocks=0), "kv_blocks = 0"),
        (dict(kv_blocks=True), "kv_blocks = True"),
        (dict(kv_blocks=1, kv_memory=1), "both"),
        (dict(kv_memory="0%"), "share"),
        (dict(kv_memory="101%"), "share"),
        (dict(kv_memory="x%"), "share"),
        (dict(kv_memory=True), "not a size"),
    ],
)
def test_what_is_no_budget(options, said):
    with pytest.raises(ResourceError, match=said):
        Budget.of(**options)


def test_slots_are_numbered_in_32_bits():
    with pytest.raises(ResourceError, match="32-bit"):
        plan_blocks([FULL], LIMITS, 1024, 2**30, None)


def test_the_table_shows_every_part():
    text = planned(kv_blocks=10, swap_memory=12288).text([100, 1024])
    for part in ("weights", "5,000", "81,920", "40,960", "12,288", "window 64", "of   100 tokens  1", "free"):
        assert part in text
    assert machine.free_memory() > 1 << 20
