"""A graph taken apart into its layers: the ops of one numbered module each.

An op belongs to the layer that its `loc` names down to the first number. What depends on positions and
weights alone (rotary tables, masks) is shared by all layers, wherever it was computed first, and belongs to
none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from compiler.explanation.attention import attention_of
from compiler.explanation.experts import mixtures
from compiler.explanation.facts import Attention, Experts, Layer, Missed, Rotary
from compiler.explanation.recurrence import RECURRENCES, recurrence_of
from ir.graph import Arg, Graph, Op, Value, Weight
from ir.ops import OPS
from ir.types import KV
from passes.match import attribute, operand, shape

Key = tuple[str, int | None]
OUTSIDE: Key = ("", None)

ATTENTIONS = ("attention", "paged_attention")
NORMS = ("rms_norm", "layer_norm")
_SHOWN = frozenset({"softmax", "sum", "mean", "max", "cumsum", "matmul", "conv1d", "embed", "take", "topk"})


def layer_of(loc: str) -> Key:
    """`model.layers.3.self_attn` -> ("model.layers", 3)."""
    parts = loc.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return OUTSIDE if first is None else (".".join(parts[:first]), int(parts[first]))


def keys_of(graph: Graph) -> frozenset[Key]:
    return frozenset(layer_of(op.loc) for op in graph.ops)


def split(graph: Graph, known: Container[Key]) -> dict[Key, list[Op]]:
    """The graph's ops by layer, in order; those outside last. known: the layers of the model as imported."""
    hidden, found = _from_tokens(graph), dict[Key, list[Op]]()
    for op in graph.ops:
        key = _layer(op, known) if any(o.name in hidden for o in op.outs) else OUTSIDE
        found.setdefault(key, []).append(op)
    return {**{k: v for k, v in found.items() if k != OUTSIDE}, OUTSIDE: found.get(OUTSIDE, [])}


def _layer(op: Op, known: Container[Key]) -> Key:
    """A linear that adds a residual has the place of the sum: then its weight says where it is."""
    keys = [layer_of(op.loc), *(layer_of(a.name) for a in op.args if isinstance(a, Weight))]
    return next((k for k in keys if k != OUTSIDE and k in known), OUTSIDE)


def _from_tokens(graph: Graph) -> set[str]:
    """Values that depend on the tokens themselves, which the first input holds."""
    found = {v.name for v in graph.inputs[:1]}
    for op in graph.ops:
        if any(v.name in found for v in op.values):
            found.update(o.name for o in op.outs)
    return found


def kv_inputs(graph: Graph) -> list[Value]:
    return [v for v in graph.inputs if isinstance(v.type, KV)]


def groups_of(graph: Graph) -> dict[str, int]:
    """The group of each version of each KV state, by name."""
    found = {v.name: g for g, v in enumerate(kv_inputs(graph))}
    for op in graph.ops:
        for out in op.outs:
            if isinstance(out.type, KV):
                found[out.name] = found[next(op.values).name]
    return found


def rewritten(before: Graph, after: Graph, known: Container[Key]) -> dict[Key, int]:
    """How many ops a pass changed: results that are still wanted, and that another op makes now."""
    makers, wanted, counts = before.producers(), _wanted(after), Counter[Key]()
    for op in after.ops:
        old = makers.get(op.outs[0].name)
        if old is not None and op.outs[0].name in wanted and (old.kind, old.attrs) != (op.kind, op.attrs):
            counts[_layer(op, known)] += 1
    return dict(counts)


def _wanted(graph: Graph) -> set[str]:
    """Values that the outputs depend on."""
    found = {v.name for v in graph.outputs}
    for op in reversed(graph.ops):
        if any(o.name in found for o in op.outs):
            found.update(v.name for v in op.values)
    return found


@dataclass
class History:
    """What the passes said on the way, by layer or by value."""

    rewritten: dict[Key, dict[str, int]] = field(default_factory=dict)
    misses: dict[Key, list[Missed]] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)

    def changed(self, name: str, before: Graph, after: Graph, known: Container[Key]) -> None:
        """Add what a pass changed."""
        for key, count in rewritten(before, after, known).items():
            counts = self.rewritten.setdefault(key, {})
            counts[name] = counts.get(name, 0) + count


def layers_of(first: Graph, last: Graph, history: History) -> tuple[Layer, ...]:
    """first, last: the graph before and after all passes, or as far as they came."""
    known, reader = keys_of(first), _Reader(last, history)
    before, after = split(first, known), split(last, known)
    keys = list(dict.fromkeys(k for k in (*before, *after) if k != OUTSIDE))
    return tuple(
        reader.layer(key, after.get(key, []), _count_linears(before.get(key, []))) for key in (*keys, OUTSIDE)
    )


def _count_linears(ops: Iterable[Op]) -> int:
    return sum(op.kind == "linear" for op in ops)


class _Reader:
    def __init__(self, graph: Graph, history: History) -> None:
        self.constants = graph.constants()
        self.history, self.makers, self.groups = history, graph.producers(), groups_of(graph)

    def layer(self, key: Key, ops: Sequence[Op], num_linears: int) -> Layer:
        """Operands of an op may be made outside the layer."""
        prefix = ".".join(str(p) for p in key if p not in ("", None))
        return Layer(
            container=key[0],
            index=key[1],
            attentions=tuple(self.attention(op) for op in ops if op.kind in ATTENTIONS),
            rotary=tuple(dict.fromkeys(self.rotary(op) for op in ops if op.kind == "rope")),
            norms=dict(Counter(_norm(op) for op in ops if op.kind in NORMS)),
            linears=tuple(self.linear(op, prefix) for op in ops if op.kind == "linear"),
            num_linears=num_linears,
            others=dict(Counter(op.kind for op in ops if self.is_shown(op))),
            rewritten=self.history.rewritten.get(key, {}),
            misses=tuple(self.history.misses.get(key, ())),
            experts=tuple(self.experts(ops, prefix)),
            recurrences=tuple(recurrence_of(op, self.groups) for op in ops if op.kind in RECURRENCES),
        )

    def is_shown(self, op: Op) -> bool:
        """Whether it computes something in every step, and has no row of its own."""
        computes = OPS[op.kind].pointwise or op.kind in _SHOWN
        return computes and op.outs[0].name not in self.constants

    def attention(self, op: Op) -> Attention:
        return attention_of(op, self.groups, self.history.proofs)

    def rotary(self, op: Op) -> Rotary:
        size, pairs = shape(op.args[0])[-1], shape(op.args[1])[-1]
        tables = [w.name for w in self.weights(op.args[1])]
        return Rotary(
            2 * pairs,  # type: ignore[operator, arg-type]
            size,  # type: ignore[arg-type]
            attribute(op, "offset"),
            attribute(op, "interleaved"),
            tuple(tables),
        )

    def experts(self, ops: Sequence[Op], prefix: str) -> Iterator[Experts]:
        """Names are those within the layer."""
        for found in mixtures(ops, self.makers):
            weights, shared, (router,) = (
                tuple(name.removeprefix(f"{prefix}.") for name in names)
                for names in (found.weights, found.shared, (found.router,))
            )
            yield replace(found, weights=weights, shared=shared, router=router)

    def linear(self, op: Op, prefix: str) -> str:
        """Its weights' names within the layer, and what it does besides multiplying."""
        names = [w.name.removesuffix(".weight") for w in self.weights(op.args[1])]
        names = [n.removeprefix(f"{prefix}.") if n != prefix else "itself" for n in names]
        activation = attribute(op, "activation")
        notes = [
            *([activation] if activation != "none" else []),
            *(["gated"] if attribute(op, "gated") else []),
            *(["bias"] if operand(op, 2) is not None else []),
            *(["residual"] if operand(op, 3) is not None else []),
        ]
        return joined(names) + (f" ({', '.join(notes)})" if notes else "")

    def weights(self, arg: Arg) -> list[Weight]:
        """The weights that an operand is made from, through all ops between."""
        if isinstance(arg, Weight):
            return [arg]
        op = self.makers.get(arg.name) if isinstance(arg, Value) else None
        found = (w for a in op.args for w in self.weights(a)) if op is not None else ()
        return list(dict.fromkeys(found))


def joined(names: Sequence[str]) -> str:
    """self_attn.q_proj + k_proj + v_proj: the module that all are in is said once."""
    folder = names[0].rpartition(".")[0] if names else ""
    shown = (
        names
        if not all(n.startswith(f"{folder}.") for n in names)
        else [names[0], *(n.removeprefix(f"{folder}.") for n in names[1:])]
    )
    return " + ".join(shown) or "of computed weights"


def _norm(op: Op) -> str:
    return f"{op.kind} (eps {attribute(op, 'eps'):g})"


def tied_weights(graph: Graph) -> Mapping[str, tuple[str, ...]]:
    """Weights that several modules read, with those modules in order."""
    readers: dict[str, dict[str, None]] = {}
    for op in graph.ops:
        for weight in (a for a in op.args if isinstance(a, Weight)):
            readers.setdefault(weight.name, {})[op.loc] = None
    return {name: tuple(modules) for name, modules in readers.items() if len(modules) > 1}


def position_tables(graph: Graph) -> list[tuple[str, int]]:
    """Weights of which a row is picked for each position, with their rows."""
    hidden, makers = _from_tokens(graph), _Reader(graph, History())
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.kind in ("embed", "take") and op.outs[0].name not in hidden:
            for weight in makers.weights(op.args[1 if op.kind == "embed" else 0]):
                found[weight.name] = shape(weight)[0]  # type: ignore[assignment]
    return list(found.items())


def width_of(graph: Graph) -> int | None:
    """The size of a token's embedding."""
    tokens = (op for op in graph.ops if op.kind == "embed" and op.args[0] == graph.inputs[0])
    return next((shape(op.args[1])[-1] for op in tokens), None)  # type: ignore[return-value]
