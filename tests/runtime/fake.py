"""A tiny deterministic model behind the Executor protocol, that really reads its keys through tables and
writes them through slots. All of it is integer arithmetic, so equal means equal, and any wrong slot, table
entry, length, position or stale block changes every later token. Two layers: what a token stores in the
second depends on its whole past.

Groups may be quantised by the block, as a KV format with scales per channel is: each has a tail, in which the
tokens of a block are until it is full. What their block keeps of them then depends on all of it.

Others are states of a recurrence: a layer's word, 0 at first, is changed by each token's own. A block keeps
its tokens' words, and those of the layers before its first token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from runtime import sampler
from runtime.engine import Engine
from runtime.errors import EngineError
from runtime.executor import Logits, SampleArgs, Sampled, broken_rows
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.manifest import Model
from runtime.sequence import Sequence as Sample
from runtime.speculation.choose import Acceptance
from runtime.speculation.drafter import Drafter
from runtime.speculation.pace import Pace
from runtime.speculation.speculation import Speculation
from runtime.step import Step

BLOCK = 16
VOCAB = 97
Window = int | None | Literal["state"]  # of a group: positions that a token sees, None for all; or what it is


def mix(*words: int) -> int:
    """A 64-bit hash of some integers (splitmix64's finaliser)."""
    h = 0x9E3779B97F4A7C15
    for word in words:
        h = (h ^ (word & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 27
        h = h * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 31
    return h


@functools.lru_cache(100_000)
def logits_of(state: int) -> np.ndarray:
    """f32 [V], a function of 64 bits. Not to be written."""
    counter = np.zeros((VOCAB, 4), np.uint64)
    counter[:, 0] = np.arange(VOCAB)
    words = sampler.philox(counter, state)[:, 0]
    return (words.astype(np.float64) * (6.0 / 2**32) - 3.0).astype(np.float32)


@functools.lru_cache(100_000)
def coarse(words: tuple[int, ...]) -> list[int]:
    """What a quantised block keeps of each of its tokens' words."""
    scale = mix(13, *words)
    return [mix(word, scale) for word in words]


def seen(words: list[int], p: int, window: int | None, quantized: int | None) -> list[int]:
    """What a token at position p reads of its own and earlier tokens' words: exact ones of its own block
    alone, where a group is quantised in blocks of so many tokens."""
    if quantized is not None:
        own = p // quantized * quantized
        blocks = (tuple(words[at : at + quantized]) for at in range(0, own, quantized))
        words = [*(word for block in blocks for word in coarse(block)), *words[own:]]
    return words[0 if window is None else max(0, p - window + 1) : p + 1]


def reference(tokens: list[int], windows: Sequence[Window], quantized: int | None = None) -> np.ndarray:
    """Logits after the last token, without a cache: f32 [V]. quantized: tokens of a block, see seen()."""
    past: list[tuple[list[int], list[int]]] = [([], []) for _ in windows]
    state = 0
    for p in range(len(tokens)):
        state, past = next_state(tokens[p], p, past, windows, [quantized] * len(windows))
    return logits_of(state)


Words = tuple[list[int], list[int]]  # in one group, what each layer keeps of every token, or has after it


def next_state(
    token: int, p: int, past: list[Words], windows: Sequence[Window], quantized: Sequence[int | None]
) -> tuple[int, list[Words]]:
    """The state after a token at position p, and the words of all tokens up to it."""
    state, groups = token, list[Words]()
    for g, (window, block, (first, second)) in enumerate(zip(windows, quantized, past, strict=True)):
        if window == "state":
            first = [*first, mix(*(first[-1:] or [0]), mix(g, token, p))]
            second = [*second, mix(*(second[-1:] or [0]), mix(7, state, first[-1]))]
            state = mix(state, first[-1], second[-1])
            groups.append((first, second))
            continue
        first = [*first, mix(g, token, p)]
        keys = seen(first, p, window, block)
        second = [*second, mix(7, state, *keys)]
        state = mix(state, *keys, *seen(second, p, window, block))
        groups.append((first, second))
    return state, groups


class FakeExecutor:
    """Per group and slot two 64-bit words, and of a state two more for a block, garbage at first. fail,
    fail_copies: what forward and copies raise. nan: the token whose logits are NaN. What stands for the
    logits are the rows' numbers, in which nothing can be seen of them.

    windows: of the groups that are no tails. quantized: which of them have tails, which come after all of
    them.
    """

    target = "fake"

    def __init__(
        self,
        num_blocks: list[int],
        windows: Sequence[Window],
        block: int = BLOCK,
        quantized: Iterable[int] = (),
    ) -> None:
        rng = np.random.default_rng(0)
        self.windows, self.block = windows, block
        self.tails = {group: len(windows) + i for i, group in enumerate(sorted(quantized))}
        rows = [block + (window == "state") for window in windows] + [block] * len(self.tails)
        self.pools = [
            rng.integers(0, 2**63, (count, size, 2), dtype=np.uint64)
            for count, size in zip(num_blocks, rows, strict=False)
        ]
        self.steps: list[tuple[int, int]] = []  # (tokens, requests) of each
        self.fail: Exception | None = None
        self.fail_copies: Exception | None = None
        self.nan: int | None = None
        self.closed = False
        self.host: dict[tuple[int, int], np.ndarray] = {}  # (group, place) -> a block's words

    def forward(self, step: Step) -> Logits:
        if self.fail is not None:
            raise self.fail
        self._check(step)
        self.steps.append((len(step.ids), len(step.lens)))
        states = np.zeros(len(step.ids), np.uint64)
        for r in range(len(step.lens)):
            self._words = {g: self._before(step, r, g) for g, w in enumerate(self.windows) if w == "state"}
            for t in range(step.starts[r], step.starts[r + 1]):
                states[t] = self._token(step, r, t)
        logits = np.array([logits_of(int(states[row])) for row in step.rows], np.float32)
        logits = logits.reshape(-1, VOCAB)
        logits[step.ids[step.rows] == self.nan] = np.nan
        self._logits = logits
        return np.arange(len(logits))

    def _token(self, step: Step, r: int, t: int) -> int:
        token, p = int(step.ids[t]), int(step.pos[t])
        state = token
        for g, window in enumerate(self.windows):
            if window == "state":
                state = self._change(step, r, g, p, state, mix(g, token, p))
                continue
            tail = self.tails.get(g, g)
            place = divmod(int(step.slots[tail][t]), self.block)
            self.pools[tail][*place, 0] = mix(g, token, p)
            words = self._read(step, r, g, 0 if window is None else max(0, p - window + 1), p)
            first = words[:, 0].tolist()
            second = mix(7, state, *first)
            self.pools[tail][*place, 1] = second
            state = mix(state, *first, *words[:-1, 1].tolist(), second)
            if tail != g and (p + 1) % self.block == 0:
                self._quantize(step, r, g, p // self.block)
        return state

    def _read(self, step: Step, r: int, g: int, low: int, p: int) -> np.ndarray:
        """The words of positions low to p, [n, 2]: those of p's own block are in the tail, if it has one."""
        first, own, tail = low // self.block, p // self.block, self.tails.get(g, g)
        before = self.pools[g][step.tables[g][r, first:own]]
        words = [*before, self.pools[tail][step.tables[tail][r, own], : p % self.block + 1]]
        return np.concatenate(words)[low - first * self.block :]

    def _before(self, step: Step, r: int, g: int) -> tuple[int, int]:
        """A state's words before a request's first token of the step."""
        p = int(step.pos[step.starts[r]])
        if p == 0:
            return 0, 0
        i = (p - 1) // self.block
        block = int(step.tables[g][r, i])
        assert block >= 0, "a block that is read was left out"
        *tokens, (first, second) = self.pools[g][block].tolist()
        for own in tokens[: p - i * self.block]:
            first, second = mix(first, own[0]), mix(second, own[1])
        return first, second

    def _change(self, step: Step, r: int, g: int, p: int, state: int, own: int) -> int:
        """What a token, whose first word is given, makes of what it sees. Both stay if there is a block."""
        before = self._words[g]
        first = mix(before[0], own)
        second = mix(7, state, first)
        self._words[g] = first, mix(before[1], second)
        block = int(step.tables[g][r, p // self.block])
        if block >= 0:
            self.pools[g][block, p % self.block] = own, second
            if p % self.block == 0:
                self.pools[g][block, self.block] = before
        return mix(state, *self._words[g])

    def _quantize(self, step: Step, r: int, g: int, i: int) -> None:
        """A request's block that its tail has all of now."""
        tail = self.tails[g]
        exact = self._block(tail, int(step.tables[tail][r, i]))
        kept = self._block(g, int(step.tables[g][r, i]))
        for layer in (0, 1):
            kept[:, layer] = coarse(tuple(exact[:, layer].tolist()))

    def _check(self, step: Step) -> None:
        """What docs/artifact.md promises about a step."""
        assert step.starts[0] == 0 and step.starts[-1] == len(step.ids) == len(step.pos)
        for r, length in enumerate(step.lens):
            count = step.starts[r + 1] - step.starts[r]
            assert count > 0
            want = np.arange(length - count, length)
            assert (step.pos[step.starts[r] : step.starts[r + 1]] == want).all()
        for g, (slots, pool, table) in enumerate(zip(step.slots, self.pools, step.tables, strict=True)):
            for array in (slots, table):
                assert array.dtype == np.int32 and array.flags.c_contiguous
            assert table.max() < len(pool)
            if self.windows[g : g + 1] == ["state"]:
                continue  # -1 where there is no block
            assert len(set(slots.tolist())) == len(slots), "two tokens of a step share a slot"
            assert 0 <= slots.min() and slots.max() < len(pool) * self.block
            assert 0 <= table.min()

    def sample(self, rows: Logits, args: SampleArgs) -> Sampled:
        logits = self.download(rows)
        if np.isnan(logits).any():
            raise EngineError("octavo_sample failed with code 2")
        ids = [
            sampler.sample(
                logits[i],
                temperature=float(args.temperature[i]),
                top_k=int(args.top_k[i]),
                top_p=float(args.top_p[i]),
                min_p=float(args.min_p[i]),
                seed=int(args.seed[i]),
                sample_index=int(args.sample_index[i]),
                position=int(args.position[i]),
            )
            for i in range(len(logits))
        ]
        tops = [sampler.top(row, args.num_top) for row in logits]
        return Sampled(
            np.array(ids, np.int32),
            self.logprobs(rows, np.array(ids)),
            np.array([t[0] for t in tops], np.int32),
            np.array([t[1] for t in tops], np.float32),
        )

    def logprobs(self, rows: Logits, ids: np.ndarray) -> np.ndarray:
        return sampler.log_softmax(self.download(rows))[np.arange(len(ids)), ids].astype(np.float32)

    def broken_rows(self, rows: Logits) -> list[int]:
        return broken_rows(self.download(rows))

    def download(self, rows: Logits) -> np.ndarray:
        return self._logits[rows]

    def overwrite(self, logits: Logits, rows: np.ndarray, values: np.ndarray) -> None:
        self._logits[logits[rows]] = values

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        assert pairs.dtype == np.int32 and pairs.flags.c_contiguous
        if self.fail_copies is not None:
            raise self.fail_copies
        for source, target in pairs.tolist():
            self._block(group, target)[:] = self._block(group, source)

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        for block, place in pairs.tolist():
            self.host[group, place] = self._block(group, block).copy()

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        for place, block in pairs.tolist():
            self._block(group, block)[:] = self.host[group, place]

    def _block(self, group: int, block: int) -> np.ndarray:
        return self.pools[group][block]

    def scribble(self, seq: Sample, positions: range) -> None:
        """Write garbage where a forward of these positions writes: in their slots, or where a group is
        quantised in its tail's, and in blocks that fill."""
        for p in positions:
            for g in range(len(self.windows)):
                tail, i = self.tails.get(g, g), p // self.block
                block = self._block(tail, int(seq.tables[tail].ids[i]))
                block[p % self.block] = mix(99, p)
                if self.windows[g] == "state" and p % self.block == 0:
                    block[self.block] = mix(97, p)
                if tail != g and (p + 1) % self.block == 0:
                    self._block(g, int(seq.tables[g].ids[i]))[:] = mix(98, p)

    def close(self) -> None:
        self.closed = True


def group_of(count: int, window: Window) -> Group:
    return Group(count, state=True) if window == "state" else Group(count, window)


def fake_engine(
    *,
    kv_blocks: int | list[int] = 64,
    windows: tuple[Window, ...] = (None,),
    max_step_tokens: int = 64,
    max_requests: int = 16,
    score_rows: int = 128,
    prefix_cache: bool = True,
    max_context: int = 256,
    tokenizer=None,
    eos: tuple[int, ...] = (),
    block: int = BLOCK,
    places: int = 0,
    quantized: tuple[int, ...] = (),
    drafter: Drafter | None = None,
    max_draft_tokens: int = 8,
    draft_rows: int = 64,
    acceptance: Acceptance = "exact",
) -> Engine:
    """quantized: groups that have tails, see FakeExecutor; kv_blocks counts tails' blocks too. draft_rows: if
    there is a drafter."""
    num_groups = len(windows) + len(quantized)
    counts = [kv_blocks] * num_groups if isinstance(kv_blocks, int) else kv_blocks
    executor = FakeExecutor(counts, list(windows), block, quantized)
    groups = [group_of(count, window) for count, window in zip(counts, windows, strict=False)]
    groups += [Group(count, tail=True) for count in counts[len(windows) :]]
    cache = Cache(groups, block=block, prefix_cache=prefix_cache)
    limits = Limits(max_step_tokens, max_requests, score_rows, draft_rows if drafter else 0)
    model = Model("f32", VOCAB, max_context, None, eos)
    pace = Pace(max_draft_tokens, share=0.0)
    speculation = drafter and Speculation(drafter, pace, VOCAB, cache.log, acceptance)
    return Engine(executor, model, cache, limits, tokenizer, Swap(cache, places), speculation=speculation)
