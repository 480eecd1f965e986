"""What the compiler makes of each model type of the installed transformers, from a tiny model of it.

Each type is explained in a process of its own kind, with a time limit: what one does to its process, or how
long it takes, costs no other type anything.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from compiler.errors import CompileError
from compiler.explanation.collect import Asked, explain
from compiler.explanation.facts import Attention, Explanation, Layer
from compiler.importers import installed
from compiler.progress import Progress
from passes.paging.rules import STATE

LIMIT_S = 300
COMPILES, REFUSED, UNKNOWN = "compiles", "refused", "no tiny model"


@dataclass(frozen=True)
class Row:
    """One model type. outcome: compiles, refused, or no tiny model, which says nothing about others of it.

    stage, reason, op, module: of a refusal. attention: each kind of attention in words, as masks with what
    else it has. recurrences: shifts, short convolutions and each kind of recurrence. positions: how the model
    knows them. experts: each kind of mixture, as "2 of 8". state: whether it is refused for state beyond keys
    and values.
    """

    model_type: str
    outcome: str
    stage: str = ""
    reason: str = ""
    op: str = ""
    module: str = ""
    attention: tuple[str, ...] = ()
    recurrences: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    state: bool = False

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Coverage:
    """rows: by model type. transformers: its version."""

    transformers: str
    rows: tuple[Row, ...]

    @property
    def json(self) -> dict[str, Any]:
        return {"transformers": self.transformers, "types": [row.json for row in self.rows]}

    def __str__(self) -> str:
        from compiler.explanation.coverage_text import table

        return table(self)


def row_of(model_type: str) -> Row:
    """What is made of one type; whatever goes wrong is said in the row."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            installed.write_tiny(model_type, Path(folder))
        except CompileError as error:
            return Row(model_type, UNKNOWN, "configuration", error.what)
        try:
            found = explain(Path(folder), Asked(max_context=installed.CONTEXT))
        except CompileError as error:
            return Row(model_type, REFUSED, "import", error.what.replace(folder, "."))
        except Exception as error:  # a fault of ours, which is a row like any other
            return Row(model_type, REFUSED, "fault", f"{type(error).__name__}: {error}")
    return _row(model_type, found)


def _row(model_type: str, found: Explanation) -> Row:
    layers = found.layers
    row = Row(
        model_type,
        COMPILES,
        attention=tuple(dict.fromkeys(_kind(a) for b in layers for a in b.attentions if a.back is None)),
        recurrences=tuple(_recurrences(layers)),
        positions=tuple(_position(text) for text in found.model.positions),
        experts=tuple(dict.fromkeys(f"{e.chosen} of {e.count}" for layer in layers for e in layer.experts)),
    )
    if (no := found.refused) is None:
        return row
    place = {"stage": no.stage, "reason": no.reason, "op": no.op, "module": no.module}
    return replace(row, outcome=REFUSED, **place, state=STATE in no.reason)


def _kind(a: Attention) -> str:
    notes = [
        a.mask,
        *([f"{a.query_heads // a.kv_heads} heads a KV head"] if a.query_heads != a.kv_heads else []),
        *(["values of another size"] if a.head_size != a.value_size else []),
        *(["softcap"] if a.softcap else []),
        *(["sinks"] if a.sinks else []),
        *(["ALiBi"] if a.alibi else []),
        *(["bias by distance"] if a.by_distance else []),
    ]
    return ", ".join(notes)


def _recurrences(layers: Sequence[Layer]) -> Iterator[str]:
    back = max((a.back or 0 for layer in layers for a in layer.attentions), default=0)
    if back:
        yield f"tokens up to {back} back"
    yield from dict.fromkeys(r.rule for layer in layers for r in layer.recurrences)


def _position(text: str) -> str:
    """Without the name of the table that they come from."""
    return "learned positions" if text.startswith("a table of") else text


def cover(
    types: Sequence[str] | None = None,
    *,
    workers: int | None = None,
    limit_s: float = LIMIT_S,
    progress: Progress | None = None,
) -> Coverage:
    """A row for each type, all that are installed by default, in their order. limit_s: for each."""
    names = installed.model_types() if types is None else tuple(types)
    report, done = progress or Progress(), 0
    count = max(1, min(workers or len(os.sched_getaffinity(0)), len(names)))
    idle: SimpleQueue[Worker] = SimpleQueue()
    made = [Worker() for _ in range(count)]
    for worker in made:
        idle.put(worker)
    rows: list[Row] = []
    report.stage("explain")
    try:
        with ThreadPoolExecutor(count) as threads:
            for row in threads.map(lambda name: _asked(idle, name, limit_s), names):
                rows.append(row)
                done += 1
                report.advance(done, len(names))
    finally:
        for worker in made:
            worker.end()
    return Coverage(installed.version(), tuple(rows))


def _asked(idle: SimpleQueue[Worker], name: str, limit_s: float) -> Row:
    worker = idle.get()
    try:
        return worker.ask(name, limit_s)
    finally:
        idle.put(worker)


class Worker:
    """A process that makes rows, one after the other; ended where one takes too long, and begun anew."""

    def __init__(self, make: Callable[[str], Row] = row_of) -> None:
        self._make = make
        self._process: Any = None

    def ask(self, name: str, limit_s: float) -> Row:
        if self._process is None:
            self._begin()
        self._pipe.send(name)
        try:
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
            what = f"it takes longer than {limit_s:g} s"
        except (EOFError, OSError):
            what = "its process ended"
        self.end(wait_s=0)
        return Row(name, REFUSED, "fault", what)

    def _begin(self) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_work, args=(other, self._make), daemon=True)
        self._process.start()
        other.close()

    def end(self, wait_s: float = 10) -> None:
        """Let the process end, which the closed pipe tells it to, or end it. wait_s: before that."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(wait_s)
            self._process.kill()
            self._process.join()
            self._process = None


def _work(pipe: Any, make: Callable[[str], Row]) -> None:
    """Answer names with rows. What libraries say meanwhile is nobody's; each computes with one thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
        for name in _received(pipe):
            pipe.send(make(name))


def _received(pipe: Any) -> Iterable[str]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return
