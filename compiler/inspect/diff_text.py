"""A difference of two graphs as JSON, and as text: ops with - + and ~, layers that change alike once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from compiler.inspect.diff import Change, GraphDiff, SectionDiff
from compiler.inspect.sections import Row, Section, span
from runtime.errors import one_line

SIGNS = {"removed": "-", "added": "+", "changed": "~", "same": " "}
STYLES = {"removed": "red", "added": "green", "changed": "yellow", "same": ""}


@dataclass(frozen=True)
class OpText:
    """An op of a section, its names put back."""

    name: str
    operands: str
    attributes: tuple[str, ...]
    type: str
    loc: str
    kind: str

    @staticmethod
    def of(section: Section, row: Row) -> OpText:
        weights = iter(row.weights)
        args = [section.names[a] if isinstance(a, int) else a for a in row.args]
        args = [f"{arg}: {next(weights)}" if arg.startswith("@") else arg for arg in args]
        return OpText(
            name=", ".join(section.names[out] for out in row.outs),
            operands=", ".join(args),
            attributes=(*row.attrs, *(section.names[n] for n in row.numbered)),
            type=", ".join(row.types),
            loc=row.loc,
            kind=row.kind,
        )

    def __str__(self) -> str:
        attributes = f" {{{', '.join(self.attributes)}}}" if self.attributes else ""
        operands = f" {self.operands}" if self.operands else ""
        return f"{self.name} = {self.kind}{operands}{attributes} : {self.type}"


def as_json(found: GraphDiff, before: str, after: str) -> dict[str, Any]:
    """before, after: the names of the stages. Layers that change alike come once, with all their paths."""
    return {
        "before": {"stage": before, "ops": sum(a for a, _ in found.kinds.values())},
        "after": {"stage": after, "ops": sum(b for _, b in found.kinds.values())},
        **{status: found.counts[status] for status in SIGNS},
        "kinds": {kind: {"before": a, "after": b} for kind, (a, b) in found.kinds.items()},
        "groups": [_group_json(group) for group in found.groups],
    }


def _group_json(group: Sequence[SectionDiff]) -> dict[str, Any]:
    first = group[0]
    return {
        "sections": [section.path for section in group],
        **{status: first.counts[status] for status in SIGNS},
        "changes": [_change_json(first, c) for c in first.changes if c.status != "same"],
    }


def _change_json(section: SectionDiff, change: Change) -> dict[str, Any]:
    ops = {"before": _op(section.before, change.before), "after": _op(section.after, change.after)}
    texts = {side: str(op) for side, op in ops.items() if op is not None}
    loc = (ops["after"] or ops["before"] or _NO_OP).loc
    return {"status": change.status, "loc": loc, **texts, "what": list(change.what)}


def _op(section: Section | None, number: int | None) -> OpText | None:
    if section is None or number is None:
        return None
    return OpText.of(section, section.template.rows[number])


_NO_OP = OpText("", "", (), "", "", "")


def lines(found: GraphDiff, before: str, after: str) -> Iterator[Text]:
    """For people; the styles are for a terminal."""
    counts = found.counts
    ops = [sum(count[side] for count in found.kinds.values()) for side in (0, 1)]
    told = ", ".join(f"{counts[s]:,} {s}" for s in ("removed", "added", "changed", "same"))
    yield Text(f"{before} -> {after}: {ops[0]:,} -> {ops[1]:,} ops; {told}", "bold")
    yield from _kinds(found)
    for group in found.groups:
        yield Text()
        yield from _group(group)


def _kinds(found: GraphDiff) -> Iterator[Text]:
    differing = {kind: pair for kind, pair in found.kinds.items() if pair[0] != pair[1]}
    width = max((len(kind) for kind in differing), default=0)
    for kind, (before, after) in differing.items():
        text = Text(f"  {kind:{width}} {before:6,} -> {after:6,} ")
        yield text.append(f"{after - before:+,}", "green" if after > before else "red")


def _group(group: Sequence[SectionDiff]) -> Iterator[Text]:
    first = group[0]
    if set(first.counts) == {"same"}:
        yield Text(f"{_places(group)}: nothing changes", "dim")
        return
    title = Text(_places([first]), "bold")
    if len(group) > 1:
        title.append(f"  (the same in {_places(group[1:])})", "dim")
    told = ", ".join(f"{first.counts[s]} {s}" for s in SIGNS if first.counts[s])
    yield title.append(f"  {told}", "dim")
    loc = None
    for change in first.changes:
        if change.status == "same":
            continue
        old, new = _op(first.before, change.before), _op(first.after, change.after)
        shown = new or old or _NO_OP
        if shown.loc != loc:
            loc = shown.loc
            yield Text(f"  // {one_line(loc) or _places([first])}", "dim")
        yield Text(f"  {SIGNS[change.status]} {shown}{_what(change, old, new)}", STYLES[change.status])


def _places(group: Sequence[SectionDiff]) -> str:
    return one_line(span([section.path for section in group]))


def _what(change: Change, old: OpText | None, new: OpText | None) -> str:
    """Of a changed op what differs: the whole of a part, of attributes those that do."""
    if old is None or new is None or not change.what:
        return ""
    return f"   ({'; '.join(text for what in change.what for text in _part(what, old, new))})"


def _part(what: str, old: OpText, new: OpText) -> Iterator[str]:
    if what != "attributes":
        yield f"{what} was {getattr(old, what) or 'none'}"
        return
    gone = [text for text in old.attributes if text not in new.attributes]
    come = [text for text in new.attributes if text not in old.attributes]
    yield f"had {', '.join(gone)}" if gone else f"has got {', '.join(come)}"
