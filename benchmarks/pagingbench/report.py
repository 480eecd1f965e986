"""What a measurement found: its bounds and whether they hold, and figures beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Bound:
    """A figure that must stay below `limit`, or above it."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value < self.limit


@dataclass
class Report:
    name: str
    bounds: list[Bound] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(bound.holds for bound in self.bounds)

    @property
    def json(self) -> dict[str, Any]:
        bounds = [asdict(bound) | {"holds": bound.holds} for bound in self.bounds]
        return {"name": self.name, "holds": self.holds, "bounds": bounds, "figures": self.figures}

    def show(self) -> None:
        table = Table("bound", "found", "limit", "holds", title=self.name, title_justify="left")
        for bound in self.bounds:
            limit = f"{'at least' if bound.at_least else 'below'} {bound.limit:g}"
            table.add_row(bound.what, f"{bound.value:.4g}", limit, "yes" if bound.holds else "NO")
        console = Console(width=110)
        console.print(table)
        for name, value in self.figures.items():
            console.print(f"  {name}: {_short(value)}", highlight=False, markup=False, soft_wrap=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values), "count": len(values)}


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    if isinstance(value, list):
        return "; ".join(_short(each) for each in value)
    return str(value)
