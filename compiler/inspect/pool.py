"""Graphs as small JSON: each text, template and list of names once, whatever layers and stages have it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from compiler.inspect.diff import SectionDiff, diff_sections
from compiler.inspect.sections import Row, Section, Template, sections
from ir.graph import Graph
from ir.text import print_type
from ir.text.printer import print_arg

T = TypeVar("T", bound=Hashable)
STATUSES = ("same", "changed", "removed", "added")
PARTS = ("name", "operands", "attributes", "type", "loc")
ALL_SAME = -1


@dataclass
class Pool(Generic[T]):
    """Things by number, each once."""

    numbers: dict[T, int] = field(default_factory=dict[T, int])

    def add(self, thing: T) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))

    def __iter__(self) -> Iterator[T]:
        return iter(self.numbers)


@dataclass
class GraphPool:
    """Encodes graphs and their differences. What its lists hold, compiler/inspect/page/model.js reads."""

    texts: Pool[str] = field(default_factory=Pool[str])
    templates: Pool[Template] = field(default_factory=Pool[Template])
    names: Pool[tuple[str, ...]] = field(default_factory=Pool[tuple[str, ...]])
    changes: Pool[tuple[int, ...]] = field(default_factory=Pool[tuple[int, ...]])
    alike: Pool[object] = field(default_factory=Pool[object])
    parts: list[tuple[Section, ...]] = field(default_factory=list[tuple[Section, ...]])

    def graph(self, graph: Graph) -> dict[str, Any]:
        found = sections(graph)
        self.parts.append(found)
        return {
            "inputs": [
                [self.texts.add(print_arg(v)), self.texts.add(print_type(v.type))] for v in graph.inputs
            ],
            "outputs": [self.texts.add(print_arg(v)) for v in graph.outputs],
            "sections": [self._section(section) for section in found],
        }

    def _section(self, section: Section) -> list[Any]:
        """[path, template, names, [first op of a run, its length, ...]]"""
        template, names = self.templates.add(section.template), self.names.add(section.names)
        return [self.texts.add(section.path), template, names, runs(section.order)]

    def diff(self, before: int, after: int) -> list[list[int]]:
        """Of two graphs by number: [section before or -1, section after or -1, changes or ALL_SAME, a number
        that sections which change alike share]."""
        old, new = self.parts[before], self.parts[after]
        places = [{s.path: n for n, s in enumerate(found)} for found in (old, new)]
        return [
            [*(place.get(each.path, -1) for place in places), self._changes(each), self._alike(each)]
            for each in diff_sections(old, new)
        ]

    def _alike(self, each: SectionDiff) -> int:
        return self.alike.add(each.nameless())

    def _changes(self, each: SectionDiff) -> int:
        """[status, row before or -1, row after or -1, what changed as bits of PARTS, ...]"""
        if set(each.counts) == {"same"}:
            return ALL_SAME
        flat: list[int] = []
        for change in each.changes:
            rows = [-1 if row is None else row for row in (change.before, change.after)]
            flat += [
                STATUSES.index(change.status),
                *rows,
                sum(1 << PARTS.index(part) for part in change.what),
            ]
        return self.changes.add(tuple(flat))

    def json(self) -> dict[str, Any]:
        """Everything that the numbers stand for."""
        templates = [self._template(template) for template in self.templates]
        names = [[self.texts.add(name) for name in names] for names in self.names]
        return {
            "templates": templates,
            "names": names,
            "changes": list(self.changes),
            "texts": list(self.texts),
        }

    def _template(self, template: Template) -> list[Any]:
        inputs = [[slot, self.texts.add(type_)] for slot, type_ in template.inputs]
        return [inputs, [self._row(row) for row in template.rows]]

    def _row(self, row: Row) -> list[Any]:
        """[kind, outs, args: an index of names, or -1 - a text, attrs, numbered, types, weights, loc]"""
        add = self.texts.add
        args = [arg if isinstance(arg, int) else -1 - add(arg) for arg in row.args]
        texts = [[add(text) for text in each] for each in (row.attrs, row.types, row.weights)]
        return [add(row.kind), row.outs, args, texts[0], row.numbered, texts[1], texts[2], add(row.loc)]


def runs(numbers: Sequence[int]) -> list[int]:
    """Ascending numbers as first, length, first, length ..."""
    found: list[int] = []
    for number in numbers:
        if found and number == found[-2] + found[-1]:
            found[-1] += 1
        else:
            found += [number, 1]
    return found


def pairs(count: int) -> Iterable[tuple[int, int]]:
    return ((a, b) for a in range(count) for b in range(a + 1, count))
