"""Checking a compile by running it, against the reference interpreter.

The graph is evaluated before and after every pass on the same random tokens, and the first value that differs
names the pass and the op. Values that keep their meaning keep their name through a pass, so equal names are
compared, in the paged layout: [tokens, ...], all tokens of all requests in order. The paged form is run in
two steps with shuffled blocks, so that chunking, paging and packing are part of the comparison. What a pass
leaves alone is neither computed nor compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compiler.errors import CompilerFault
from compiler.pipeline import Stage
from ir.graph import Graph, Op, Value
from ir.interpret import KVState, Run, empty_kv, interpret
from ir.ops import ANNOTATIONS
from ir.reuse import Key, Reuse
from ir.text.printer import print_op
from ir.types import KV, Tensor
from passes.paging.layout import Layout, Q, T, layout_of, to_tokens

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDING = 2e-3  # share of a value's RMS that reassociated f32 arithmetic may differ by


class CheckError(CompilerFault, ValueError):
    """A pass changed what the graph computes. `pass_name` and `op` are the first that diverge."""

    def __init__(self, pass_name: str, op: Op | None, message: str) -> None:
        self.pass_name, self.op = pass_name, op
        shown = f"  {print_op(op).strip()}" if op is not None else ""
        super().__init__(f"{pass_name} {message}", where="--check", shown=shown)


@dataclass(frozen=True)
class Batch:
    """Requests whose tokens are split over steps; a step is a tuple of chunks (request, first, last)."""

    requests: tuple[Array, ...]
    steps: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def lengths(self) -> list[int]:
        return [len(r) for r in self.requests]

    def offset(self, request: int) -> int:
        return sum(self.lengths[:request])


def random_batch(vocab_size: int, context: int, block: int = 16, seed: int = 0) -> Batch:
    """Two requests of up to 5 tokens and, in two chunks, as many as need a second KV block."""
    rng = np.random.default_rng(seed)
    first, second = min(max(block, 16) + 3, context), min(5, context)
    cut = max(1, first * 2 // 3)
    requests = tuple(rng.integers(0, vocab_size, n).astype(np.int32) for n in (first, second))
    steps = (((0, 0, cut), (1, 0, second)), ((0, cut, first),) if cut < first else ())
    return Batch(requests, tuple(s for s in steps if s))


@dataclass(frozen=True)
class Seen:
    """A value over the batch, [all tokens in request order, ...], and what it is known by in each run."""

    array: Array
    keys: Key


@dataclass
class Checker:
    """Give `on_stage` to run_pipeline. Raises CheckError."""

    read: Callable[[str], Any]
    batch: Batch
    _reuse: Reuse = field(default_factory=Reuse)
    _before: Mapping[str, Seen] = field(default_factory=dict[str, Seen])
    _program: Any = None
    _logits: str = ""
    _rounds: bool = False  # to codes, where rounding in f32 may decide between two of them

    def __post_init__(self) -> None:
        self.read = KeptArrays(self.read)

    def on_stage(self, stage: Stage) -> None:
        program = (*map(_without_annotations, stage.graph.ops), *stage.graph.outputs)
        if program == self._program:
            return
        self._rounds |= stage.tolerance > 0 and stage.name.startswith("quantize_")
        self._reuse.next_round()
        after = Observer(stage.graph, self.read, self.batch, self._reuse, self._before).run()
        if stage.index:
            self._compare(stage, after)
        self._before, self._program, self._logits = after, program, stage.graph.outputs[0].name

    def compare_logits(self, name: str, logits: Array) -> None:
        """Compare a compiled forward's logits for the batch, [tokens, V], with the last stage's."""
        error = relative_error(self._before[self._logits].array, logits, largest=not self._rounds)
        if not error <= ROUNDING:
            raise CheckError(name, None, f"gives logits that differ by {error:.1e} of their RMS")

    def _compare(self, stage: Stage, after: Mapping[str, Seen]) -> None:
        logits = stage.graph.outputs[0].name
        if logits != self._logits or after[logits].array.size != self._before[logits].array.size:
            raise CheckError(stage.name, None, f"gives %{logits} in place of %{self._logits}")
        for op in stage.graph.ops:
            for out in op.outs:
                before, now = self._before.get(out.name), after.get(out.name)
                if before is not None and now is not None and before.keys != now.keys:
                    self._compare_value(stage, op, out, before.array, now.array)

    def _compare_value(self, stage: Stage, op: Op, out: Value, before: Array, now: Array) -> None:
        if before.size != now.size:
            return
        # rounding by design is worst where a value has outliers: judged as a whole
        error = relative_error(before.reshape(now.shape), now, largest=not stage.tolerance)
        allowed = ROUNDING + stage.tolerance
        if not error <= allowed:
            shown = f"changes %{out.name} by {error:.1e} of its RMS (allowed {allowed:.0e})"
            raise CheckError(stage.name, op, shown)


class KeptArrays:
    """A weight reader that keeps what it read, up to a limit: a check reads each weight once per stage."""

    LIMIT_BYTES = 2 << 30

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read, self._kept, self._bytes = read, dict[str, Array](), 0

    def __call__(self, name: str) -> Array:
        if name in self._kept:
            return self._kept[name]
        array = np.asarray(self._read(name))
        if self._bytes + array.nbytes <= self.LIMIT_BYTES:
            self._kept[name], self._bytes = array, self._bytes + array.nbytes
        return array


def _without_annotations(op: Op) -> Op:
    return replace(op, attrs={name: a for name, a in op.attrs.items() if name not in ANNOTATIONS})


def relative_error(expected: Array, found: Array, largest: bool = True) -> float:
    """The largest difference, or the RMS of all, over the RMS of what is expected; NaN and infinities must
    agree."""
    e, f = np.asarray(expected, np.float64), np.asarray(found, np.float64)
    if e.size == 0:
        return 0.0
    same = (e == f) | (np.isnan(e) & np.isnan(f))
    finite = np.isfinite(e)
    rms = float(np.sqrt(np.mean(np.square(e[finite])))) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(e - f))
    error = difference.max() if largest else np.sqrt(np.mean(np.square(difference)))
    return float(error) / max(rms, 1e-6)


@dataclass
class Observer:
    """Every per-token value of a run over the batch, by name; those known already are taken from `before`."""

    graph: Graph
    read: Callable[[str], Any]
    batch: Batch
    reuse: Reuse
    before: Mapping[str, Seen]

    def run(self) -> dict[str, Seen]:
        return self._imported() if "S" in self.graph.dims else self._paged()

    def _imported(self) -> dict[str, Seen]:
        outs = [o for op in self.graph.ops for o in op.outs]
        layouts = {o.name: layout_of(o.type.shape) for o in outs if isinstance(o.type, Tensor)}
        found = {name: layout for name, layout in layouts.items() if layout is not None}
        runs: list[Parts] = []
        for ids in self.batch.requests:
            inputs = {"ids": ids[None], "pos": np.arange(len(ids), dtype=np.int32)[None]}
            runs.append(_parts(interpret(self.graph, inputs, self.read, reuse=self.reuse), found))

        def joined(name: str) -> Array:
            return np.concatenate([to_tokens(run[name][0], found[name]) for run in runs])

        return {name: self._seen(name, layout, runs, joined) for name, layout in found.items()}

    def _paged(self) -> dict[str, Seen]:
        batch = self.batch
        states = {v.name: v.type for v in self.graph.inputs if isinstance(v.type, KV)}
        tables = {name: _shuffled_blocks(kv, batch) for name, kv in states.items()}
        kv: dict[str, KVState] = {n: empty_kv(t, sum(map(len, tables[n])) + 1) for n, t in states.items()}
        names = [o.name for op in self.graph.ops for o in op.outs if _is_per_token(o)]
        runs: list[Parts] = []
        for step in batch.steps:
            packed = pack_step(batch, step, {n: (t.block, tables[n]) for n, t in states.items()})
            run = interpret(self.graph, {**packed, **kv}, self.read, reuse=self.reuse)
            kv = dict(zip(states, run.outputs[1:], strict=True))
            runs.append(_parts(run, names))

        def joined(name: str) -> Array:
            first = runs[0][name][0]
            array = np.zeros((sum(batch.lengths), *first.shape[1:]), first.dtype)
            for step, run in zip(batch.steps, runs, strict=True):
                index = np.concatenate([batch.offset(r) + np.arange(lo, hi) for r, lo, hi in step])
                array[index] = run[name][0]
            return array

        return {name: self._seen(name, None, runs, joined) for name in names}

    def _seen(
        self, name: str, layout: Layout | None, runs: Sequence[Parts], joined: Callable[[str], Array]
    ) -> Seen:
        keys = (layout, *(run[name][1] for run in runs))
        before = self.before.get(name)
        return before if before is not None and before.keys == keys else Seen(joined(name), keys)


Parts = Mapping[str, tuple[Array, Key]]


def _parts(run: Run, names: Iterable[str]) -> Parts:
    return {name: (run.values[name], run.keys[name]) for name in names}


def _is_per_token(value: Value) -> bool:
    return isinstance(value.type, Tensor) and bool(value.type.shape) and value.type.shape[0] in (T, Q)


def _shuffled_blocks(kv: KV, batch: Batch) -> list[list[int]]:
    """Block ids of each request, in no order, leaving block 0 unused."""
    counts = [-(-n // kv.block) for n in batch.lengths]
    ids = np.random.default_rng(1).permutation(np.arange(1, sum(counts) + 1)).tolist()
    return [[ids.pop() for _ in range(n)] for n in counts]


def pack_step(
    batch: Batch, step: Sequence[tuple[int, int, int]], tables: Mapping[str, tuple[int, list[list[int]]]]
) -> dict[str, Array]:
    """The paged form's inputs for one step.

    tables: per kv input, its block size and each request's blocks.
    """
    ids = np.concatenate([batch.requests[r][lo:hi] for r, lo, hi in step])
    pos = np.concatenate([np.arange(lo, hi) for _, lo, hi in step]).astype(np.int32)
    starts = np.cumsum([0, *(hi - lo for _, lo, hi in step)]).astype(np.int32)
    inputs = {"ids": ids, "pos": pos, "starts": starts, "lens": np.array([hi for _, _, hi in step], np.int32)}
    inputs["rows"] = np.arange(len(ids), dtype=np.int32)
    for name, (block, blocks) in tables.items():
        group = name.removeprefix("kv")
        width = max(-(-hi // block) for _, _, hi in step)
        rows = [(blocks[r] + [0] * width)[:width] for r, _, _ in step]
        slots = [blocks[r][p // block] * block + p % block for r, lo, hi in step for p in range(lo, hi)]
        inputs[f"table{group}"] = np.array(rows, np.int32)
        inputs[f"slots{group}"] = np.array(slots, np.int32)
    return inputs
