"""Summaries as a table for the terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table

from sidebyside.peers import PEERS
from sidebyside.summary import Row

HEADINGS = (
    "engine", "formats", "workload", "tok/s of", "Octavo", "peer", "ratio", "range", "GB/s", "of bound",
    "agree",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    return (
        PEERS[row.peer].title,
        f"{row.dtype} / {row.peer_format}",
        row.workload.name,
        row.figure,
        _rate(row.octavo),
        _rate(row.peer_rate),
        f"{row.ratio:.2f}",
        f"{row.lowest:.2f} to {row.highest:.2f}",
        f"{row.bandwidth / 1e9:.1f}",
        "" if row.share is None else f"{row.share:.0%}",
        f"{row.agreement:.0%}",
    )


def terminal(rows: Iterable[Row]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table


def markdown(rows: Iterable[Row]) -> str:
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"
