"""The difference of two graphs, layer by layer, as ops removed, added and changed.

Ops are the same ones where results keep their names, as the passes let them; else where they do the same in
the same place, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compiler.inspect.sections import Row, Section, sections
from ir.graph import Graph

Status = Literal["same", "changed", "removed", "added"]


@dataclass(frozen=True)
class Change:
    """What became of an op. before, after: its row in the section of either graph, or None.

    what: of a changed one, the parts that differ: name, operands, attributes, type, loc.
    """

    status: Status
    before: int | None
    after: int | None
    what: tuple[str, ...] = ()


@dataclass(frozen=True)
class SectionDiff:
    """path: of the layer in both graphs; a graph that has none of it has no section."""

    path: str
    before: Section | None
    after: Section | None
    changes: tuple[Change, ...]

    @property
    def counts(self) -> Counter[str]:
        return Counter(change.status for change in self.changes)

    def nameless(self) -> object:
        """What changes, names and the numbers of layers, groups and buffers aside.

        It is equal in sections that change alike, whatever else is in them.
        """
        numbers: dict[str, int] = {}

        def told(section: Section | None, number: int | None) -> object:
            if section is None or number is None:
                return None
            row = section.template.rows[number]
            slots = (*row.outs, *(arg for arg in row.args if isinstance(arg, int)))
            named = tuple(numbers.setdefault(section.names[slot], len(numbers)) for slot in slots)
            texts = tuple(arg for arg in row.args if isinstance(arg, str))
            return row.kind, named, texts, row.attrs, len(row.numbered), row.types, row.weights, row.loc

        changes = [change for change in self.changes if change.status != "same"]
        return tuple(
            (c.status, told(self.before, c.before), told(self.after, c.after), c.what) for c in changes
        )


@dataclass(frozen=True)
class GraphDiff:
    """groups: sections that change alike together. kinds: (ops before, ops after) of each kind of op."""

    groups: tuple[tuple[SectionDiff, ...], ...]
    kinds: Mapping[str, tuple[int, int]]

    @property
    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for group in self.groups:
            for section in group:
                found.update(section.counts)
        return found


def diff(before: Graph, after: Graph) -> GraphDiff:
    groups: dict[object, list[SectionDiff]] = {}
    for section in diff_sections(sections(before), sections(after)):
        groups.setdefault(section.nameless(), []).append(section)
    counts = [Counter(op.kind for op in graph.ops) for graph in (before, after)]
    kinds = {kind: (counts[0][kind], counts[1][kind]) for kind in sorted(counts[0] | counts[1])}
    return GraphDiff(tuple(tuple(group) for group in groups.values()), kinds)


def diff_sections(before: Sequence[Section], after: Sequence[Section]) -> list[SectionDiff]:
    """In the order of the second graph, those that it lacks where they were."""
    old, new = ({s.path: s for s in found} for found in (before, after))
    paths = merge(list(old), list(new))
    return [SectionDiff(p, old.get(p), new.get(p), compare(old.get(p), new.get(p))) for p in paths]


def merge(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Each path once: those of `new` in order, each that it lacks after the one before it in `old`."""
    found: list[str] = list(new)
    at = 0
    for path in old:
        if path in found:
            at = found.index(path) + 1
        else:
            found.insert(at, path)
            at += 1
    return found


def compare(before: Section | None, after: Section | None) -> tuple[Change, ...]:
    """Every op of both once, in the order of the second, removed ones before what came in their place."""
    if before is not None and after is not None and before.template == after.template:
        if before.names == after.names:
            return tuple(Change("same", n, n) for n in range(len(before.template.rows)))
    partner = _partners(before, after)
    return tuple(_ordered(before, after, partner))


def _partners(before: Section | None, after: Section | None) -> dict[int, int]:
    """The row before of each row after that is the same op."""
    if before is None or after is None:
        return {}
    by_name = {(row.kind, before.names[row.outs[0]]): n for n, row in enumerate(before.template.rows)}
    found = {
        n: by_name[key]
        for n, row in enumerate(after.template.rows)
        if (key := (row.kind, after.names[row.outs[0]])) in by_name
    }
    taken = set(found.values())
    left: dict[object, list[int]] = {}
    for n, row in enumerate(before.template.rows):
        if n not in taken:
            left.setdefault(_does(before, row), []).append(n)
    for n, row in enumerate(after.template.rows):
        if n not in found and (same := left.get(_does(after, row))):
            found[n] = same.pop(0)
    return found


def _does(section: Section, row: Row) -> object:
    """What an op does and where, whatever it is called."""
    return row.kind, _named(section, row.args), row.attrs, row.types, row.loc


def _named(section: Section, args: Sequence[int | str]) -> tuple[str, ...]:
    return tuple(section.names[arg] if isinstance(arg, int) else arg for arg in args)


def _ordered(before: Section | None, after: Section | None, partner: Mapping[int, int]) -> Iterator[Change]:
    old = before.template.rows if before else ()
    new = after.template.rows if after else ()
    ends = {before.names[out]: n for n, row in enumerate(old) for out in row.outs} if before else {}
    removed = [n for n in range(len(old)) if n not in set(partner.values())]
    for n, row in enumerate(new):
        assert after is not None
        same = partner.get(n)
        # What an added op stands for is what was there up to its result's old place.
        until = (
            same
            if same is not None
            else max((ends.get(after.names[out], -1) for out in row.outs), default=-1)
        )
        while removed and removed[0] <= until:
            yield Change("removed", removed.pop(0), None)
        if same is None:
            yield Change("added", None, n)
        else:
            assert before is not None
            what = _differences(before, old[same], after, row)
            yield Change("changed" if what else "same", same, n, what)
    yield from (Change("removed", n, None) for n in removed)


def _differences(before: Section, old: Row, after: Section, new: Row) -> tuple[str, ...]:
    pairs = {
        "name": [_named(s, row.outs) for s, row in ((before, old), (after, new))],
        "operands": [(_named(s, row.args), row.weights) for s, row in ((before, old), (after, new))],
        "attributes": [(row.attrs, _named(s, row.numbered)) for s, row in ((before, old), (after, new))],
        "type": [old.types, new.types],
        "loc": [old.loc, new.loc],
    }
    return tuple(name for name, (first, second) in pairs.items() if first != second)
