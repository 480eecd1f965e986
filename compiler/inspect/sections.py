"""A graph by layer. Layers that do the same share a template: their ops without the names.

A layer is the ops whose loc starts with one path that ends in a number, such as `model.layers.3`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ir.graph import Graph, Op, Value, Weight
from ir.text import print_attr, print_type
from ir.text.printer import print_arg
from ir.types import DType, Tensor, Type

BEFORE, AFTER = "before", "after"  # in place of a layer's path, which ends in a number
_ANY = Tensor(DType.F32, ())
NUMBERED = ("layer", "group", "at")  # attributes that differ from layer to layer in layers that do the same


@dataclass(frozen=True)
class Row:
    """An op without names: outs, args and `numbered` index the section's names; a text in args is itself.

    weights: types of the operands that are weights. loc: within the layer.
    """

    kind: str
    outs: tuple[int, ...]
    args: tuple[int | str, ...]
    attrs: tuple[str, ...]
    numbered: tuple[int, ...]
    types: tuple[str, ...]
    weights: tuple[str, ...]
    loc: str


@dataclass(frozen=True)
class Template:
    """inputs: indices and types of values that come from outside the section."""

    rows: tuple[Row, ...]
    inputs: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Section:
    """path: of the layer, or BEFORE (what layers need) or AFTER (the rest). order: the ops' places in it all.

    names: `%value`, `@weight` and `layer=3`, by the template's indices; each op's numbers have their own.
    """

    path: str
    template: Template
    names: tuple[str, ...]
    order: tuple[int, ...]


def sections(graph: Graph) -> tuple[Section, ...]:
    """Every op in one of them: what the layers need, the layers in order of their first op, the rest."""
    texts = Texts()
    return tuple(
        _Namer(texts, path).section([(n, graph.ops[n]) for n in order])
        for path, order in _by_layer(graph).items()
    )


@dataclass
class Texts:
    """Types and attributes as text, each printed once."""

    types: dict[Type, str] = field(default_factory=dict[Type, str])

    def type(self, type_: Type) -> str:
        if type_ not in self.types:
            self.types[type_] = print_type(type_)
        return self.types[type_]


def _by_layer(graph: Graph) -> dict[str, list[int]]:
    """Places of the ops of each section, by its path."""
    paths = layer_paths(op.loc for op in graph.ops)
    found: dict[str, list[int]] = {BEFORE: []}
    needed: set[str] = set()
    before: set[int] = set()
    for number, op in reversed(tuple(enumerate(graph.ops))):
        if paths[op.loc] or any(out.name in needed for out in op.outs):
            needed.update(value.name for value in op.values)
            before.add(number)
    for number, op in enumerate(graph.ops):
        place = paths[op.loc] or (BEFORE if number in before else AFTER)
        found.setdefault(place, []).append(number)
    last = found.pop(AFTER, [])
    return {path: order for path, order in (*found.items(), (AFTER, last)) if order}


def layer_paths(locs: Iterable[str]) -> dict[str, str]:
    """The layer that each loc is in, "" for none: up to the first number that counts something, not the one
    child of a sequence."""
    split = {loc: loc.split(".") for loc in locs}
    siblings: dict[tuple[str, ...], set[str]] = {}
    for parts in split.values():
        for at in _numbers(parts):
            siblings.setdefault(tuple(parts[:at]), set()).add(parts[at])
    found: dict[str, str] = {}
    for loc, parts in split.items():
        places = _numbers(parts)
        counting = [at for at in places if len(siblings[tuple(parts[:at])]) > 1]
        found[loc] = ".".join(parts[: (counting or places)[0] + 1]) if places else ""
    return found


def _numbers(parts: Sequence[str]) -> list[int]:
    return [at for at, part in enumerate(parts) if part.isascii() and part.isdecimal()]


class _Namer:
    """Takes the names out of one section's ops."""

    def __init__(self, texts: Texts, path: str) -> None:
        self.texts, self.path = texts, path
        self.names: list[str] = []
        self.slots: dict[tuple[type, str], int] = {}

    def section(self, ops: Sequence[tuple[int, Op]]) -> Section:
        made = {out.name for _, op in ops for out in op.outs}
        given = {v.name: v for _, op in ops for v in op.values if v.name not in made}
        inputs = tuple((self._slot(value), self.texts.type(value.type)) for value in given.values())
        rows = tuple(self._row(op) for _, op in ops)
        return Section(self.path, Template(rows, inputs), tuple(self.names), tuple(n for n, _ in ops))

    def _slot(self, named: Value | Weight) -> int:
        key = (type(named), named.name)
        if key not in self.slots:
            sign = "%" if isinstance(named, Value) else "@"
            self.slots[key] = self._new(sign + spelled(named.name))
        return self.slots[key]

    def _new(self, text: str) -> int:
        self.names.append(text)
        return len(self.names) - 1

    def _row(self, op: Op) -> Row:
        attrs = {name: f"{name}={print_attr(value)}" for name, value in op.attrs.items()}
        return Row(
            op.kind,
            tuple(self._slot(out) for out in op.outs),
            tuple(self._slot(a) if isinstance(a, Value | Weight) else print_arg(a) for a in op.args),
            tuple(text for name, text in attrs.items() if name not in NUMBERED),
            tuple(self._new(text) for name, text in attrs.items() if name in NUMBERED),
            tuple(self.texts.type(out.type) for out in op.outs),
            tuple(self.texts.type(arg.type) for arg in op.args if isinstance(arg, Weight)),
            "" if op.loc == self.path else op.loc.removeprefix(f"{self.path}."),
        )


def spelled(name: str) -> str:
    """A name as the IR's text has it: quoted where it is not plain."""
    return print_arg(Value(name, _ANY))[1:]


def span(paths: Sequence[str]) -> str:
    """Layers in words: model.layers.0, 2-4; then those of another parent."""
    found: dict[str, list[int]] = {}
    for path in paths:
        parent, _, number = path.rpartition(".")
        found.setdefault(parent, []).append(int(number)) if number.isdecimal() else found.setdefault(path, [])
    return "; ".join(_ranges(parent, numbers) for parent, numbers in found.items())


def _ranges(parent: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return {BEFORE: "before the layers", AFTER: "after the layers"}.get(parent, parent)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{parent}.{shown}" if parent else shown
