"""The pipeline, watched: what every pass changed, missed and noted, and where a refusal points to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from compiler.explanation.facts import Explanation, Group, Layer, Missed, Model, Refusal
from compiler.explanation.layers import (
    ATTENTIONS,
    History,
    Key,
    groups_of,
    keys_of,
    kv_inputs,
    layer_of,
    layers_of,
    position_tables,
    width_of,
)
from compiler.pipeline import Stage, run_pipeline
from compiler.progress import Progress
from ir.graph import Graph, Op
from ir.rewrite import Miss
from ir.text import print_op
from ir.types import KV
from passes.base import Pass, PassError

MAX_BECAUSE = 3  # near misses that a refusal shows
MIXERS = ("fuse_attention", "scan_tokens")  # passes that recognise what mixes tokens


class Trace:
    """first, last: the graph before and after the passes that ran. lines: source lines by value name."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.first: Graph | None = None
        self.last: Graph | None = None
        self.lines: Mapping[str, str] = {}
        self.passes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.history = History()
        self.known = frozenset[Key]()
        self._stage, self._started = "", time.perf_counter()

    def stage(self, name: str) -> None:
        """A stage begins, and the one before it has ended."""
        self._end()
        self._stage = name
        self.progress.stage(name)

    def _end(self) -> None:
        now = time.perf_counter()
        if self._stage:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._started
        self._stage, self._started = "", now

    def look(self, graph: Graph) -> None:
        """Take a graph that has been through the passes already."""
        self.first = self.last = graph

    def run(self, graph: Graph, passes: Sequence[Pass]) -> Refusal | None:
        """Run passes until one refuses the graph, and say why."""

        def on_stage(stage: Stage) -> None:
            self._see(stage)
            self.progress.graph(stage.name, stage.graph, stage.count, stage.misses)
            if stage.index < len(passes):
                self.stage(passes[stage.index].name)

        try:
            run_pipeline(graph, passes, on_stage)
        except PassError as error:
            return self._refusal(error)
        return None

    def run_as_far_as_possible(self, graph: Graph, passes: Sequence[Pass]) -> None:
        """Run passes over the part of a model that was imported before one op was refused."""
        try:
            self.run(graph, passes)
        except Exception:  # not a whole model: what a pass makes of its loose ends is nobody's fault
            return

    def _see(self, stage: Stage) -> None:
        if self.first is None or self.last is None:
            self.first = self.last = stage.graph
            self.known = keys_of(stage.graph)
            return
        self.passes[stage.name] = self.passes.get(stage.name, 0) + stage.count
        self.history.changed(stage.name, self.last, stage.graph, self.known)
        for miss in stage.misses:
            self.history.misses.setdefault(layer_of(miss.op.loc), []).append(self._missed(stage.name, miss))
        self._follow_proofs(self.last, stage)
        self.last = stage.graph

    def _follow_proofs(self, before: Graph, stage: Stage) -> None:
        """How masks were proved, by the names that attentions have now: a pass keeps their order."""
        proofs = self.history.proofs
        old, new = ([o.outs[0].name for o in g.ops if o.kind in ATTENTIONS] for g in (before, stage.graph))
        if len(old) == len(new):
            proofs.update([(b, proofs[a]) for a, b in zip(old, new, strict=True) if a in proofs])
        proofs.update((note.op.outs[0].name, note.text) for note in stage.notes)

    def _missed(self, stage: str, miss: Miss) -> Missed:
        return Missed(stage, miss.rule, miss.reason, _text(miss.op), miss.op.loc, self.line(miss.op))

    def line(self, op: Op) -> str:
        """The line of the model's source that an op, or else one of its operands, comes from."""
        names = [*(o.name for o in op.outs), *(v.name for v in op.values)]
        return next((self.lines[n] for n in names if n in self.lines), "")

    def _refusal(self, error: PassError) -> Refusal:
        op = error.op
        todo = "" if error.hint.startswith("octavo explain") else error.hint.rstrip(".")  # it is this
        todo = todo[:1].upper() + todo[1:]
        found = Refusal(error.pass_name, error.reason, todo)
        if op is not None:
            found = replace(found, op=_text(op), module=op.loc, line=self.line(op))
        return replace(found, because=tuple(self._because(layer_of(op.loc) if op is not None else None)))

    def _because(self, key: Key | None) -> Iterator[Missed]:
        """Why no attention or recurrence was recognised in a layer, or anywhere: each reason once."""
        every = self.history.misses
        near = every.get(key, []) if key is not None else [m for ms in every.values() for m in ms]
        reasons = {m.reason: m for m in reversed(near) if m.stage in MIXERS}
        yield from list(reversed(reasons.values()))[:MAX_BECAUSE]

    def explanation(self, model: Model, refused: Refusal | None) -> Explanation:
        self._end()
        if self.first is None or self.last is None:
            return Explanation(model, refused=refused, seconds=self.seconds)
        layers = layers_of(self.first, self.last, self.history)
        model = replace(
            model,
            positions=tuple(_positions(self.last, layers)),
            num_layers=sum(bool(b.attentions or b.recurrences) for b in layers if b.index is not None),
            width=width_of(self.first),
        )
        groups = tuple(_groups(self.last))
        return Explanation(model, layers, groups, self.passes, refused, self.seconds)


def _text(op: Op) -> str:
    """The op without its place, which is said beside it."""
    return print_op(replace(op, loc="")).rstrip()


def _groups(graph: Graph) -> Iterator[Group]:
    groups = groups_of(graph)
    for g, kv in enumerate(v.type for v in kv_inputs(graph)):
        assert isinstance(kv, KV)
        writes = (o for o in graph.ops if any(groups.get(out.name) == g for out in o.outs))
        streams = tuple(f"{s.name} {s.dtype}[{s.heads},{s.head_size}]" for s in kv.streams)
        yield Group(
            tuple(w.loc for w in writes),
            kv.window,
            kv.block,
            streams,
            kv.bytes_per_block // kv.block,
            kv.state,
            kv.bytes_per_block,
        )


def _positions(graph: Graph, layers: Iterable[Layer]) -> Iterator[str]:
    """How the model knows positions."""
    if any(b.rotary for b in layers):
        yield "rotary embedding"
    elif any(m.stage == "fuse_rope" for b in layers for m in b.misses):
        yield "rotary embedding, not fused"
    if any(a.alibi for b in layers for a in b.attentions):
        yield "ALiBi"
    if any(a.by_distance for b in layers for a in b.attentions):
        yield "a bias by distance"
    yield from (f"a table of {rows} rows, @{name}" for name, rows in position_tables(graph))
