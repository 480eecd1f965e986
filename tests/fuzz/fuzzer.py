"""What a fuzzer is, and how one case of it is judged."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from runtime.errors import OctavoError
from tests.fuzz.lines import Lines
from tests.fuzz.watch import Fault, Watch

MAX_MESSAGE = 20_000


@dataclass(frozen=True)
class Fuzzer:
    """make: write a case into a folder. run: read it, and say as what it was accepted; where it was, check
    that it holds together. refusals: what it may raise instead. readers: the files whose lines are counted.
    """

    name: str
    make: Callable[[Random, Path], None]
    run: Callable[[Path], str]
    readers: tuple[str, ...]
    refusals: tuple[type[Exception], ...] = (OctavoError,)
    evaluates: bool = False


@dataclass
class Tally:
    """What became of the cases."""

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def num_cases(self) -> int:
        return self.accepted.total() + self.refused.total()

    def text(self, most: int = 12) -> str:
        """The share that was accepted, the kinds of refusals, and the commonest of them."""
        share = 100 * self.accepted.total() / max(1, self.num_cases)
        head = f"{self.num_cases} cases, {share:.0f}% accepted, {len(self.refused)} kinds of refusals"
        lines = [
            f"  {n:7} {what}" for what, n in (*self.accepted.most_common(4), *self.refused.most_common(most))
        ]
        return "\n".join([head, *lines])


def run_case(
    fuzzer: Fuzzer, number: str, folder: Path, watch: Watch, tally: Tally, lines: Lines | None
) -> None:
    """Make the case of this number (seed and count) and read it. Raises Fault."""
    make_case(fuzzer, number, folder)
    try:
        with watch.case(traced=lines is not None):
            if lines is None:
                outcome = fuzzer.run(folder)
            else:
                with lines.counted():
                    outcome = fuzzer.run(folder)
    except fuzzer.refusals as error:
        check_refusal(error)
        tally.refused[kind_of(error)] += 1
    else:
        tally.accepted[outcome] += 1


def make_case(fuzzer: Fuzzer, number: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    fuzzer.make(Random(f"{fuzzer.name} {number}"), folder)


def check_refusal(error: Exception) -> None:
    """It says what, where and what to do, in a few printable lines. Raises Fault."""
    text = str(error)
    if len(text) > MAX_MESSAGE:
        raise Fault(f"a message of {len(text)} characters: {text[:200]!r}")
    if bad := [c for c in text if not (c.isprintable() or c == "\n")]:
        raise Fault(f"a message with {bad[0]!r} in it: {text[:400]!r}")
    if isinstance(error, OctavoError) and not (error.what and error.where and error.todo):
        raise Fault(f"a message without what, where or what to do: {text!r}")
    if any(isinstance(cause, MemoryError) for cause in _causes(error)):
        raise Fault(f"memory ran out: {text!r}")


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def kind_of(error: Exception) -> str:
    """The message without the values in it."""
    what: Any = getattr(error, "what", None) or str(error)
    plain = re.sub(
        r"'[^']*'|\"[^\"]*\"|/\S+|-?\d+(\.\d+)?|\[.*\]|\{.*\}|[%@]\S+", "_", str(what).split("\n")[0]
    )
    return f"{type(error).__name__}: {plain[:90]}"
