"""The tables of `octavo inspect --kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from compiler.inspect.tables import console

if TYPE_CHECKING:
    from compiler.kernels import KernelFigures

WIDTH = 150  # where the output is no terminal
UNUSED = "not in these steps"
HEADINGS = (
    "launches\n", "regs\n", "spills\nbytes", "shared\nKiB", "occu-\npancy", "matrix\ninstructions",
    "moved\nMB", "GFLOP\n", "bound\nus", "bound\nby",
)  # fmt: skip


def show(figures: Sequence[KernelFigures], steps: Sequence[str]) -> None:
    """A table for each step. steps: those with counts; the sampler's come after them."""
    shown = console(WIDTH)
    for target in dict.fromkeys(row.target for row in figures):
        mine = [row for row in figures if row.target == target]
        for step in dict.fromkeys(row.step for row in mine):
            rows = [row for row in mine if row.step == step]
            total = sum(row.bound_us or 0.0 for row in rows)
            bound = f", at least {total:,.1f} us" if step in steps and total else ""
            print(f"\n{target}, {step or UNUSED}{bound}")
            shown.print(_table(rows), highlight=False)


def _table(rows: Sequence[KernelFigures]) -> Table:
    """Without the columns in which no row has anything."""
    named = any(row.name != row.op for row in rows)
    cells = [_cells(row) for row in rows]
    told = [i for i in range(len(HEADINGS)) if any(each[i] for each in cells)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    if named:
        table.add_column("\nkernel", no_wrap=True)
    table.add_column("\nop", overflow="fold")
    for i in told:
        table.add_column(HEADINGS[i], justify="right", no_wrap=True)
    for row, each in zip(rows, cells, strict=True):
        table.add_row(*[row.name] * named, row.op, *(each[i] for i in told))
    return table


def _cells(row: KernelFigures) -> tuple[str, ...]:
    matrix = None if row.matrix is None else " ".join(f"{n} {kind}" for kind, n in row.matrix.items()) or "-"
    return (
        _cell(row.launches),
        _cell(row.registers),
        _cell(row.spills),
        _cell(None if row.registers is None or row.shared_bytes is None else row.shared_bytes / 1024, ".0f"),
        _cell(row.occupancy, ".0%"),
        _cell(matrix, ""),
        _cell(None if row.bytes is None else row.bytes / 1e6, ".2f"),
        _cell(None if row.operations is None else row.operations / 1e9, ".2f"),
        _cell(row.bound_us, ".2f"),
        _cell(row.bound, ""),
    )


def _cell(value: float | str | None, form: str = "d") -> str:
    return "" if value is None else format(value, form)
