"""The coverage of model types as text: a table for a terminal, and a page of Markdown."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator

from compiler.explanation.coverage import COMPILES, REFUSED, UNKNOWN, Coverage, Row
from runtime.errors import printable, shorten

WIDTH = 110
MAX_REASON = 300

HEAD = """# Architectures
Every causal language model type of transformers {version}, as `octavo explain --all-transformers`
finds it: a tiny model of each (two layers, or one of each kind; windows and chunks of 11 tokens) is
imported and taken through the passes, without weights. `make architectures` writes this page. It says
what can be lowered; that logits are right is what `make test-zoo` tests. Where a type is refused, some
of its checkpoints may not be, and the other way round: `octavo explain DIRECTORY` tells.

"""


def table(found: Coverage) -> str:
    """A line for each type, with what was recognised or the reason why not."""
    width = max((len(row.model_type) for row in found.rows), default=0)
    lines: list[str] = []
    for row in found.rows:
        lines += textwrap.wrap(
            f"{row.model_type:{width}}  {row.outcome:13}  {_said(row)}",
            WIDTH,
            subsequent_indent=" " * (width + 17),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return printable("\n".join([*lines, "", f"transformers {found.transformers}: {summary(found)}"])) + "\n"


COUNTED = {COMPILES: "compile", REFUSED: "refused", UNKNOWN: "without a tiny model"}


def summary(found: Coverage) -> str:
    counts = Counter(row.outcome for row in found.rows)
    said = ", ".join(f"{counts[name]} {words}" for name, words in COUNTED.items() if counts[name])
    return f"{len(found.rows)} model types: {said or 'none'}"


def markdown(found: Coverage) -> str:
    """docs/architectures.md."""
    parts = [HEAD.format(version=found.transformers), f"{summary(found)}.\n"]
    for outcome, title, columns in (
        (COMPILES, "What compiles", ("attention", "recurrences", "positions", "experts")),
        (REFUSED, "What is refused", ("stage", "reason", "place")),
        (UNKNOWN, "Types without a tiny model", ("reason",)),
    ):
        rows = [row for row in found.rows if row.outcome == outcome]
        if rows:
            head = f"| type | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
            body = "\n".join(f"| `{row.model_type}` | {' | '.join(_cells(row))} |" for row in rows)
            parts.append(f"\n## {title}\n{head}\n{body}\n")
    return "".join(parts)


def _cells(row: Row) -> Iterator[str]:
    if row.outcome == COMPILES:
        yield _escaped("; ".join(row.attention))
        yield _escaped("; ".join(row.recurrences))
        yield _escaped("; ".join(row.positions))
        yield "; ".join(row.experts)
        return
    if row.outcome == REFUSED:
        yield row.stage
    yield _escaped(_reason(row))
    if row.outcome == REFUSED:
        yield f"`{row.module}`" if row.module else ""


def _said(row: Row) -> str:
    if row.outcome != COMPILES:
        place = f" ({row.module})" if row.module else ""
        return f"{row.stage}: {_reason(row)}{place}"
    notes = [*row.attention, *row.recurrences, *row.positions, *(f"experts {text}" for text in row.experts)]
    return "; ".join(notes)


def _reason(row: Row) -> str:
    """On one line, files named from their package on: a page is the same on every machine."""
    text = re.sub(r"\S*/site-packages/", "", " ".join(row.reason.split()))
    return shorten(text, MAX_REASON)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
