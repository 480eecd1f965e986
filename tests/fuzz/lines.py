"""Which lines of the readers the cases reached: a fuzzer that is refused at the first byte proves little."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]


class Lines:
    """Lines of functions, in files given relative to the repository."""

    def __init__(self, files: Sequence[str]) -> None:
        self._all = {str(ROOT / name): _function_lines(ROOT / name) for name in files}
        self._hit: dict[str, set[int]] = {name: set() for name in self._all}

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._all else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._hit[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    def text(self) -> str:
        """Of each file the share of lines that ran, and which did not."""
        return "\n".join(self._file(name) for name in self._all)

    def _file(self, name: str) -> str:
        lines = self._all[name]
        missed = sorted(lines - self._hit[name])
        share = 100 * (1 - len(missed) / max(1, len(lines)))
        shown = (
            f"; not: {', '.join(map(str, missed[:25]))}{', ...' if len(missed) > 25 else ''}"
            if missed
            else ""
        )
        return f"  {share:4.0f}% of {len(lines):4} lines of {Path(name).relative_to(ROOT)}{shown}"


def _function_lines(path: Path) -> set[int]:
    """Lines inside of functions, their first ones aside."""
    found: set[int] = set()
    waiting: list[tuple[CodeType, bool]] = [(compile(path.read_text(), str(path), "exec"), False)]
    while waiting:
        code, is_function = waiting.pop()
        if is_function:
            found |= {line for _, _, line in code.co_lines() if line and line != code.co_firstlineno}
        nested = [c for c in code.co_consts if isinstance(c, CodeType)]
        waiting += [
            (c, is_function or bool(c.co_flags & 2)) for c in nested
        ]  # 2: CO_NEWLOCALS, a class has none
    return found
