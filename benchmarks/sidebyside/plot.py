"""Ratios as a plot: one panel per element type, one row per figure, one mark per peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidebyside.peers import PEERS
from sidebyside.summary import Row

MARKS = "osD^"


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write the plot; the file's suffix is its format."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"  # equal plots are equal files
    from matplotlib import pyplot

    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    figure, axes = pyplot.subplots(
        1, len(dtypes), figsize=(4 + 4 * len(dtypes), 4.5), sharey=True, squeeze=False
    )
    labels = list(dict.fromkeys(_label(row) for row in rows))
    for panel, dtype in zip(axes[0], dtypes, strict=True):
        _panel(panel, [row for row in rows if row.dtype == dtype], labels)
        panel.set_title(dtype)
    marks = {label: mark for panel in axes[0] for mark, label in _legend(panel)}
    figure.legend(marks.values(), marks.keys(), loc="lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _panel(panel: Any, rows: Sequence[Row], labels: Sequence[str]) -> None:
    """Median ratios with whiskers from the lowest to the highest pair; peers a little apart."""
    from matplotlib.ticker import LogLocator

    names = list(PEERS)
    for name in dict.fromkeys(row.peer for row in rows):
        mine = [row for row in rows if row.peer == name]
        index = names.index(name)
        below = [row.ratio - row.lowest for row in mine]
        above = [row.highest - row.ratio for row in mine]
        panel.errorbar(
            [row.ratio for row in mine],
            [labels.index(_label(row)) + 0.16 * (index - 1.5) for row in mine],
            xerr=[below, above],
            fmt=MARKS[index],
            color=f"C{index}",
            label=PEERS[name].title,
            capsize=2,
            linewidth=1,
        )
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(LogLocator(2, (1, 1.5)))
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_xlabel("Octavo's tokens per second over the peer's")
    panel.grid(axis="x", linewidth=0.3)


def _legend(panel: Any) -> list[tuple[Any, str]]:
    return list(zip(*panel.get_legend_handles_labels(), strict=True))


def _label(row: Row) -> str:
    return f"{row.workload.title}\n{row.figure}"
