"""What a compile shows on stderr: a bar on a terminal, else a line per slow stage; and DEBUG's levels.

Nothing goes to stdout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from compiler.cli.errors import debug_level
from compiler.progress import Progress
from runtime.errors import printable

if TYPE_CHECKING:
    from compiler.flight import Preflight
    from ir.graph import Graph
    from ir.rewrite import Miss

SLOW_S = 1.0
UNITS = {"pack": "MB", "hash": "MB", "build": "kernels"}  # of a stage's advance, by its name's first word


class Terminal(Progress):
    """A context. quiet: nothing is shown. check: called at each stage; raises where the compile must end."""

    def __init__(self, *, quiet: bool = False, check: Callable[[], None] = lambda: None) -> None:
        self.seconds: dict[str, float] = {}
        self.found: Preflight | None = None
        self._debug = debug_level()
        self._check = check
        self._console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, quiet=quiet)
        self._bar = Bar(self._console)
        self._names: Sequence[str] = ()
        self._index = 0  # of the stages that have begun
        self._stage, self._started = "", 0.0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._bar.stop()

    def preflight(self, found: Preflight) -> None:
        self.found = found
        if found.survey.kind != "unknown":  # else the import says in a moment what is wrong with it
            self._console.print(printable(str(found)))

    def stages(self, names: Sequence[str]) -> None:
        self._names = names

    def note(self, text: str) -> None:
        self._console.print(text)

    def stage(self, name: str) -> None:
        self._check()
        self._end()
        self._stage, self._started = name, time.perf_counter()
        self._index = self._names.index(name, self._index) + 1 if name in self._names[self._index :] else 0
        place = f"{self._index}/{len(self._names)} " if self._index else ""
        self._bar.start(f"{place}{name}", UNITS.get(name.split()[0], ""))

    def advance(self, done: int, total: int) -> None:
        self._check()
        self._bar.advance(done, total)

    def graph(self, name: str, graph: Graph, count: int, misses: Sequence[Miss]) -> None:
        from ir.text import print_graph

        if self._debug >= 3:
            self._console.print(f"// after {name}\n{print_graph(graph)}")
        if self._debug >= 1:
            self._console.print(f"{name}: {count} changes, {len(graph.ops)} ops")
        for miss in misses if self._debug >= 5 else ():
            self._console.print(f"  {name} missed: {miss}")

    def lowered(self, graph: Graph) -> None:
        from ir.text import print_graph

        if self._debug == 2:
            self._console.print(print_graph(graph))

    def sources(self, files: Mapping[str, str]) -> None:
        for name, text in files.items() if self._debug >= 4 else ():
            self._console.print(f"// {name}\n{text}")

    def _end(self) -> None:
        if not self._stage:
            return
        took = time.perf_counter() - self._started
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + took
        if self._debug >= 1 or took >= SLOW_S:
            shown = f"{took:6.1f} s" if took >= SLOW_S else f"{took * 1000:5.0f} ms"
            self._console.print(f"  {self._stage:20} {shown}")
        self._stage = ""


class Bar:
    """A stage's line on a terminal: what, how far, how fast, since when and for how long still."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[said]}"))
        self._bars = Bars(
            *columns, TimeElapsedColumn(), console=console, transient=True, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip
        self._task = self._bars.add_task("", total=None, said="", visible=False)
        self._shows = console.is_terminal and not console.quiet
        self._unit, self._since = "", 0.0
        self.is_started = False

    def start(self, text: str, unit: str, since: float | None = None) -> None:
        """since: of time.perf_counter(); default now."""
        if not self._shows:
            return
        self._unit, self._since = unit, time.perf_counter() if since is None else since
        self._bars.reset(self._task, total=None, description=text, visible=True, said="")
        self._bars.start()
        self.is_started = True

    def advance(self, done: int, total: int) -> None:
        if self.is_started:
            said = rate(done, total, time.perf_counter() - self._since, self._unit)
            self._bars.update(self._task, completed=done, total=total, said=said)

    def stop(self) -> None:
        if self._shows:  # else it ends a line that was not begun
            self._bars.stop()


def rate(done: int, total: int, seconds: float, unit: str) -> str:
    """How far, how fast, and how long still: "31/538 MB, 62 MB/s, 8 s left"."""
    scale = 1e6 if unit == "MB" else 1
    text = f"{done / scale:,.0f}/{total / scale:,.0f} {unit}".strip()
    if not done or seconds <= 0:
        return text
    speed = done / seconds
    shown = f"{speed / scale:,.0f}" if speed >= 10 * scale else f"{speed / scale:,.1f}"
    left = f", {(total - done) / speed:,.0f} s left" if seconds >= 1 else ""
    return f"{text}, {shown} {unit}/s{left}" if unit else text + left
