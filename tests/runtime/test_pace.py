"""The lengths of drafts beside the best that could be, in simulated steps of known times and chances."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from runtime.speculation.costs import Costs
from runtime.speculation.lengths import Prices, best, least_gain
from runtime.speculation.pace import COLD_DRAFTS, Pace, Verified

MOST = 8


@dataclass(frozen=True)
class Machine:
    """Seconds of a step by its tokens: of the target's, bound by memory and then by arithmetic, and of the
    drafter's. tile: rows, of which each more than one takes tile_s. noise: of each time, as a share."""

    read_s: float = 0.030
    token_s: float = 0.0009
    most_token_s: float = 0.004
    draft_s: float = 0.008
    draft_token_s: float = 0.0004
    noise: float = 0.1
    tile: int = 1 << 20
    tile_s: float = 0.0

    def target(self, tokens: int) -> float:
        tiles_s = (-(-tokens // self.tile) - 1) * self.tile_s
        return max(self.read_s + self.token_s * tokens, self.most_token_s * tokens) + tiles_s

    def drafter(self, lengths: Sequence[int]) -> float:
        rounds = [sum(n > k for n in lengths) for k in range(max(lengths))]
        return sum(self.draft_s + self.draft_token_s * n for n in rounds)

    def rate(self, accepts: Sequence[float], lengths: Sequence[int]) -> float:
        """Tokens per second, exactly, where each draft that follows no refused one is accepted so often."""
        tokens = sum(1 + sum(a**k for k in range(1, n + 1)) for a, n in zip(accepts, lengths, strict=True))
        return tokens / (self.target(len(lengths) + sum(lengths)) + self.drafter(lengths))


SELF = Machine()
LOOKUP = Machine(draft_s=0.00001, draft_token_s=0.0)
DEAR = Machine(draft_s=0.020, draft_token_s=0.001)
MACHINES = {"self": SELF, "lookup": LOOKUP, "dear": DEAR}


@dataclass
class Run:
    """seconds: as if the machine's speed had not changed."""

    tokens: int
    seconds: float
    lengths: list[list[int]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    pace: Pace,
    machine: Machine,
    accepts: Callable[[int], Sequence[float]],
    steps: int,
    seed: int = 0,
    speed: Callable[[int], float] = lambda step: 1.0,
    finds: Sequence[float] = (),
) -> Run:
    """accepts: of each request, by step. speed: what times are multiplied with, by step. finds: how often the
    drafter has something for each request; default, always."""
    rng, run = np.random.default_rng(seed), Run(0, 0.0, [])
    for step in range(steps):
        chances = accepts(step)
        n = len(chances)
        lengths = pace.lengths(range(n), [MOST] * n, n, n)
        if finds:
            lengths = [length * bool(rng.random() < f) for length, f in zip(lengths, finds, strict=True)]
        noise = np.exp(rng.normal(-(machine.noise**2) / 2, machine.noise, 2))
        seconds = float(machine.target(n + sum(lengths)) * noise[0])
        draft_s = float(machine.drafter(lengths) * noise[1]) if any(lengths) else 0.0
        found = [
            Verified(i, length, next((k for k in range(length) if rng.random() >= chance), length))
            for i, (length, chance) in enumerate(zip(lengths, chances, strict=True))
            if length
        ]
        slow = speed(step)
        pace.learn(n, n + sum(lengths), slow * seconds, slow * draft_s, found)
        run.tokens += n + sum(v.accepted for v in found)
        run.seconds += seconds + draft_s
        run.lengths.append(lengths)
    return run


def cold(machine: Machine) -> Pace:
    return Pace(MOST, share=0.0 if machine is LOOKUP else 0.3)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("requests", "steps"), [(1, 1500), (4, 800), (16, 400)])
def test_it_comes_near_the_best_fixed_length(name: str, requests: int, steps: int) -> None:
    machine = replace(MACHINES[name], noise=0.05)
    for seed, accept in enumerate((0.0, 0.3, 0.6, 0.8, 0.95)):
        accepts = [accept] * requests
        rates = [machine.rate(accepts, [length] * requests) for length in range(MOST + 1)]
        found = simulate(cold(MACHINES[name]), machine, lambda step, a=accepts: a, steps, seed)
        top, least = max(rates), least_gain(requests) * rates[0]
        sought = top if top > least else rates[0]  # less is not sought
        assert found.rate > 0.95 * sought, (accept, found.rate / rates[0], top / rates[0])


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("requests", [1, 4, 16])
def test_it_is_never_much_slower_than_without_from_the_first_step_on(name: str, requests: int) -> None:
    machine = MACHINES[name]
    plain = machine.rate([0] * requests, [0] * requests)
    for seed, accept in enumerate((0.0, 0.2, 0.5, 0.7)):
        found = simulate(cold(machine), machine, lambda step, a=accept: [a] * requests, 400, seed)
        assert found.rate > 0.97 * plain, (accept, found.rate / plain)


TILES = {  # of 6 rows, bound by arithmetic; of 16, bound by memory
    "narrow": Machine(0.019, 0.0, 0.0023, 0.00001, 0.0, 0.08, 6, 0.0012),
    "wide": Machine(0.019, 0.0005, 0.0, 0.00001, 0.0, 0.08, 16, 0.006),
}


@pytest.mark.parametrize("name", TILES)
def test_many_requests_lose_nothing_where_a_row_more_may_be_a_tile_more(name: str) -> None:
    """By lookup, which often finds nothing, on a machine whose speed changes; 200 steps from the first on."""
    machine = TILES[name]
    plain = machine.rate([0] * 16, [0] * 16)
    for seed, accept in enumerate((0.0, 0.3, 0.6, 0.6, 0.6, 0.9)):
        speeds = np.exp(0.15 * np.sin(np.arange(200) / 7 + seed)).tolist()
        accepts, finds = [accept] * 16, [0.5] * 16
        found = simulate(
            cold(LOOKUP), machine, lambda step, a=accepts: a, 200, seed, speeds.__getitem__, finds
        )
        assert found.rate > 0.975 * plain, (accept, found.rate / plain)


@pytest.mark.parametrize("requests", [4, 16])
def test_a_request_without_drafts_has_no_others_probed(requests: int) -> None:
    finds = [0.0] + [1.0] * (requests - 1)
    accepts = [0.0] * requests
    found = simulate(cold(LOOKUP), LOOKUP, lambda step: accepts, 400, finds=finds)
    probes = np.array(found.lengths)[200:, 1:].sum(0)
    assert probes.max() <= 4


def test_no_probes_are_made_where_no_draft_could_pay() -> None:
    bound = Machine(0.0, 0.0, 0.0023, 0.0, 0.0, 0.05)
    found = simulate(cold(LOOKUP), bound, lambda step: [1.0] * 16, 500)
    assert np.sum(found.lengths[60:]) == 0
    assert np.sum(found.lengths[:60]) <= 16


def test_a_batch_of_unequal_requests_is_faster_than_with_any_one_length() -> None:
    accepts = [0.97] * 2 + [0.05] * 6
    machine = replace(LOOKUP, most_token_s=0.0)
    equal = max(machine.rate(accepts, [length] * 8) for length in range(MOST + 1))
    found = simulate(cold(LOOKUP), machine, lambda step: accepts, 600)
    late = np.mean(found.lengths[300:], axis=0)
    assert found.rate > 1.1 * equal
    assert late[:2].min() > 3 and late[2:].max() < 0.5


def test_it_finds_out_when_drafts_begin_to_be_accepted() -> None:
    pace = cold(SELF)
    found = simulate(pace, SELF, lambda step: [0.0 if step < 400 else 0.9], 1200)
    assert np.mean(found.lengths[300:400]) < 0.1
    assert np.mean(found.lengths[-300:]) > 1


def test_it_stops_when_drafts_begin_to_be_refused() -> None:
    found = simulate(cold(SELF), SELF, lambda step: [0.9 if step < 200 else 0.0], 500)
    assert np.mean(found.lengths[100:200]) > 2
    assert np.mean(found.lengths[260:]) < 0.1


def test_probes_come_at_growing_intervals() -> None:
    found = simulate(cold(DEAR), DEAR, lambda step: [0.0], 1500)
    probes = [step for step, lengths in enumerate(found.lengths) if any(lengths)]
    gaps = np.diff(probes)
    assert len(probes) < 25
    assert gaps[-1] > 150 and (gaps[-3:] > 1.3 * gaps[:4].mean()).all()


def test_it_starts_with_short_drafts() -> None:
    pace = Pace(MOST)
    found = simulate(pace, SELF, lambda step: [1.0], 60)
    first = next(step for step, lengths in enumerate(found.lengths) if any(lengths))
    assert first <= 3
    assert 2 <= found.lengths[first][0] <= COLD_DRAFTS
    assert found.lengths[-1] == [MOST]


def test_many_requests_start_with_few_drafts_altogether() -> None:
    found = simulate(Pace(MOST), replace(SELF, most_token_s=0.0), lambda step: [0.9] * 16, 8)
    first = next(lengths for lengths in found.lengths if any(lengths))
    assert sum(first) <= COLD_DRAFTS + 16 // 2


def test_a_machine_that_slows_down_changes_nothing_but_the_times() -> None:
    rng = np.random.default_rng(3)
    speeds = np.repeat(np.exp(rng.normal(0, 0.4, 20)), 80).tolist()  # another one every 80 steps
    for accept in (0.8, 0.0):
        top = max(SELF.rate([accept], [length]) for length in range(MOST + 1))
        found = simulate(cold(SELF), SELF, lambda step, a=accept: [a], 1600, speed=lambda step: speeds[step])
        assert found.rate > 0.92 * top, (accept, found.rate / top)


def test_lengths_follow_from_what_was_told_alone() -> None:
    runs = [simulate(cold(SELF), SELF, lambda step: [0.7, 0.4], 200, seed=5) for _ in range(2)]
    assert runs[0].lengths == runs[1].lengths


def test_a_request_that_has_finished_is_forgotten() -> None:
    pace = cold(LOOKUP)
    simulate(pace, LOOKUP, lambda step: [0.95, 0.0], 300)
    before = pace.lengths([0, 1], [MOST, MOST], 2, 2)
    pace.forget(1)
    after = pace.lengths([0, 1], [MOST, MOST], 2, 2)
    assert before[1] <= 1 < after[1]


def test_no_request_is_given_more_than_it_may_have() -> None:
    pace = cold(LOOKUP)
    simulate(pace, LOOKUP, lambda step: [0.95] * 3, 100)
    found = pace.lengths([0, 1, 2], [2, 0, MOST], 3, 3)
    assert found[0] == 2 and found[1] == 0 and 2 < found[2] <= MOST


def test_drafts_beside_a_prompt_cost_what_they_add_to_it() -> None:
    """A step of 200 prompt tokens takes long, but drafts are worth no more than in one without."""
    pace = cold(SELF)
    for tokens in (64, 128, 256) * 3:  # in steps that sample nothing else, nothing is learned
        pace.learn(0, tokens, SELF.target(tokens))
    assert pace.lengths([0], [MOST], 1, 201) == [0], "nothing is known of a step"
    simulate(pace, SELF, lambda step: [0.8], 300)
    pure = pace.lengths([0], [MOST], 1, 1)[0] or pace.lengths([0], [MOST], 1, 1)[0]
    assert abs(pace.lengths([0], [MOST], 1, 201)[0] - pure) <= 2


def test_the_saving_is_what_was_saved() -> None:
    quiet = Machine(noise=0.02)
    pace = Pace(MOST)
    found = simulate(pace, quiet, lambda step: [0.85], 1500)
    assert pace.speedup == pytest.approx(found.rate / quiet.rate([0], [0]), rel=0.05)


def test_the_best_lengths_are_those_of_an_exhaustive_search() -> None:
    """Times known exactly, three requests of unlike chances, all 9**3 lengths tried."""
    rng = np.random.default_rng(11)
    for trial in range(12):
        machine = Machine(read_s=rng.uniform(0.01, 0.05), draft_s=rng.uniform(0, 0.02), noise=0.0)
        target, drafter = Costs(), Costs()
        for tokens in range(1, 3 * (MOST + 1) + 1):
            for _ in range(20):
                target.learn(tokens, machine.target(tokens))
                drafter.learn(tokens, machine.draft_s + machine.draft_token_s * tokens)
        accepts = rng.uniform(0.1, 0.98, 3).tolist()
        chances = [[a**k for k in range(1, MOST + 1)] for a in accepts]
        top = max(machine.rate(accepts, list(n)) for n in itertools.product(range(MOST + 1), repeat=3))
        found, _ = best(chances, 3, 3, Prices(target, drafter, 0.0))
        assert machine.rate(accepts, found) > 0.97 * top, (trial, accepts, found)


def test_times_of_sizes_that_did_not_run_lie_between_those_that_did() -> None:
    costs = Costs()
    for _ in range(20):
        for tokens in (1, 5, 33):
            costs.learn(tokens, 0.030 + 0.002 * tokens)
    for tokens in (1, 2, 3, 5, 16, 33):
        assert costs.at(tokens) == pytest.approx(0.030 + 0.002 * tokens, rel=0.02)
    for tokens in (40, 48):
        assert costs.at(tokens) == pytest.approx(0.030 + 0.002 * tokens, rel=0.1)


def test_a_leap_between_sizes_that_run_often_is_kept() -> None:
    costs, rng = Costs(), np.random.default_rng(5)

    def took(tokens: int) -> float:
        return 0.002 * tokens + 0.010 * (tokens > 18)

    for _ in range(60):
        for tokens in (16, 18, 19, 24):
            costs.learn(tokens, took(tokens) * float(np.exp(rng.normal(0, 0.05))))
    for tokens in (16, 18, 19, 24):
        assert costs.at(tokens) == pytest.approx(took(tokens), rel=0.05), tokens


def test_one_odd_time_moves_little_and_a_lasting_change_all() -> None:
    costs = Costs()
    for _ in range(50):
        costs.learn(1, 0.030)
        costs.learn(5, 0.040)
    costs.learn(5, 4.0)
    assert costs.at(5) < 0.052
    for _ in range(40):
        costs.learn(5, 0.080)
    assert costs.at(5) == pytest.approx(0.080, rel=0.05)
    assert costs.at(1) == pytest.approx(0.060, rel=0.35), "what all sizes have in common moved too"


def test_no_draft_is_longer_than_the_longest_where_there_is_room_for_more() -> None:
    pace = Pace(3)
    for _ in range(100):
        lengths = pace.lengths([0], [50], 1, 1)
        assert 0 <= lengths[0] <= 3
        pace.learn(1, 1 + lengths[0], LOOKUP.target(1 + lengths[0]), 0.0, [Verified(0, *lengths * 2)])
    assert lengths == [3]
