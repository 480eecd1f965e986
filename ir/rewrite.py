"""Pattern rewriting: rules look at one op and its producers, and say what replaces it or why not.

A rule sees each op once per sweep, in order, with earlier rewrites already done. The replacement of an op's
result keeps that result's name, so that runs before and after a pass can be compared value by value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ir.build import GraphBuilder
from ir.graph import Arg, Graph, Op, Value


@dataclass(frozen=True)
class Miss:
    """A near miss: the rule's pattern began to match at an op, and why it did not apply."""

    rule: str
    op: Op
    reason: str

    def __str__(self) -> str:
        where = f" ({self.op.loc})" if self.op.loc else ""
        return f"{self.rule}: %{self.op.outs[0].name} = {self.op.kind}{where}: {self.reason}"


Replacement = Sequence[Arg] | Arg
Apply = Callable[[Op, "View"], "Replacement | Miss"]


@dataclass(frozen=True)
class Rule:
    """`apply(op, view)` returns the op's replacement values (one, or a sequence for several results), a Miss
    with a reason, or None where the pattern is not there at all."""

    name: str
    kinds: tuple[str, ...]
    apply: Apply


@dataclass(frozen=True)
class Rewritten:
    graph: Graph
    counts: Mapping[str, int]
    misses: tuple[Miss, ...]

    @property
    def count(self) -> int:
        return sum(self.counts.values())


@dataclass
class View:
    """What a rule sees of the graph being built: producers, number of uses, and `op` to emit new ops."""

    builder: GraphBuilder
    uses: Mapping[str, int]
    outputs: frozenset[str] = frozenset()
    loc: str = ""
    _producers: dict[str, Op] = field(default_factory=dict[str, Op])

    def producer(self, arg: Arg) -> Op | None:
        """The op that made a value; None for inputs, weights and literals."""
        return self._producers.get(arg.name) if isinstance(arg, Value) else None

    def made_by(self, arg: Arg, *kinds: str) -> Op | None:
        """The producer if it is of one of these kinds."""
        op = self.producer(arg)
        return op if op is not None and op.kind in kinds else None

    def num_uses(self, value: Value) -> int:
        """Ops and outputs that read a value in the graph before this sweep."""
        return self.uses.get(value.name, 0)

    def op(self, kind: str, *args: Arg, loc: str | None = None, name: str = "", **attrs: Any) -> Value:
        """Emit an op before the one being rewritten; its loc is that op's unless given."""
        loc = self.loc if loc is None else loc
        value = self.builder.op(kind, *args, loc=loc, name=name, several=False, **attrs)
        self.record(self.builder.ops[-1])
        return value

    def ops(self, kind: str, *args: Arg, loc: str | None = None, **attrs: Any) -> tuple[Value, ...]:
        """Emit an op with several results."""
        values = self.builder.op(kind, *args, loc=self.loc if loc is None else loc, several=True, **attrs)
        self.record(self.builder.ops[-1])
        return values

    def record(self, op: Op) -> None:
        for out in op.outs:
            self._producers[out.name] = op


def rewrite(graph: Graph, rules: Sequence[Rule], max_sweeps: int = 10) -> Rewritten:
    """Apply rules until a sweep changes nothing. Ops left without users stay; `dce` removes them.

    Raises RuntimeError if the rules still change the graph after max_sweeps.
    """
    counts: Counter[str] = Counter()
    taken: set[str] = set()  # a name that was dropped is not given to another value
    for _ in range(max_sweeps):
        taken.update(out.name for op in graph.ops for out in op.outs)
        graph, found, misses = _sweep(graph, rules, taken)
        counts.update(found)
        if not found:
            return Rewritten(graph, dict(counts), tuple(misses))
    raise RuntimeError(f"rules {[r.name for r in rules]} do not settle on graph @{graph.name}")


def keep_output_names(before: Graph, after: Graph) -> Graph:
    """The graph with its outputs called what they were called before, except outputs that are inputs.

    For passes that put an equal value in an output's place, so that runs can be compared by name.
    """
    inputs, taken = {v.name for v in after.inputs}, after.producers().keys()
    names: dict[str, Value] = {}
    for old, new in zip(before.outputs, after.outputs, strict=True):
        if old.name != new.name and not {old.name, new.name} & inputs and old.name not in taken:
            names.setdefault(new.name, Value(old.name, new.type))
    if not names:
        return after
    outputs = tuple(names.get(v.name, v) for v in after.outputs)
    return replace(after, ops=tuple(op.renamed(names) for op in after.ops), outputs=outputs)


def count_uses(graph: Graph) -> Counter[str]:
    """How many operands and outputs read each value."""
    uses = Counter(v.name for op in graph.ops for v in op.values)
    uses.update(v.name for v in graph.outputs)
    return uses


def _sweep(
    graph: Graph, rules: Sequence[Rule], taken: Iterable[str]
) -> tuple[Graph, Counter[str], list[Miss]]:
    builder = GraphBuilder(graph.name, graph.dims, graph.inputs)
    builder.reserve(taken)
    view = View(builder, count_uses(graph), frozenset(v.name for v in graph.outputs))
    now: dict[str, Arg] = {}
    counts: Counter[str] = Counter()
    misses: list[Miss] = []
    for old in graph.ops:
        op = old.reading(now)
        view.loc = op.loc
        found = _first_match(op, rules, view, misses)
        if found is None:
            builder.ops.append(op)
            view.record(op)
            continue
        rule, values, start = found
        counts[rule.name] += 1
        now.update(_keep_names(op, values, view, start))
    outputs = [_output(v, now.get(v.name, v), graph) for v in graph.outputs]
    return replace(builder.graph(outputs), arena=graph.arena), counts, misses


def _output(old: Value, new: Arg, graph: Graph) -> Value:
    if not isinstance(new, Value) or new.type != old.type:
        raise RuntimeError(f"a rule replaced %{old.name}, an output of graph @{graph.name}, by {new}")
    return new


def _first_match(
    op: Op, rules: Sequence[Rule], view: View, misses: list[Miss]
) -> tuple[Rule, tuple[Arg, ...], int] | None:
    for rule in rules:
        if op.kind not in rule.kinds:
            continue
        start = len(view.builder.ops)
        result = rule.apply(op, view)
        if result is not None and not isinstance(result, Miss):
            values = tuple(result) if isinstance(result, Sequence) else (result,)
            if len(values) != len(op.outs):
                raise RuntimeError(f"rule {rule.name} gave {len(values)} values for {len(op.outs)} results")
            if not _ends_without_value(op, values, view):
                return rule, values, start
        misses.extend([result] if isinstance(result, Miss) else [])
        del view.builder.ops[start:]
    return None


def _ends_without_value(op: Op, values: tuple[Arg, ...], view: View) -> bool:
    """Whether an output of the graph would become a weight or a literal, which no graph returns."""
    named = zip(op.outs, values, strict=True)
    return any(out.name in view.outputs and not isinstance(value, Value) for out, value in named)


def _keep_names(op: Op, values: tuple[Arg, ...], view: View, start: int) -> dict[str, Arg]:
    """Substitutions for the op's results; results of ops emitted just now take the old names."""
    renames: dict[str, Value] = {}
    table: dict[str, Arg] = {}
    fresh = {out.name for emitted in view.builder.ops[start:] for out in emitted.outs}
    for out, new in zip(op.outs, values, strict=True):
        if isinstance(new, Value) and new.name in fresh and new.type == out.type and new.name not in renames:
            renames[new.name] = out
        else:
            table[out.name] = new
    for i in range(start, len(view.builder.ops)):
        renamed = view.builder.ops[i].renamed(renames)
        view.builder.ops[i] = renamed
        view.record(renamed)
    return {name: renames.get(a.name, a) if isinstance(a, Value) else a for name, a in table.items()}
