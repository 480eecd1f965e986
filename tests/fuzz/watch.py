"""What a reader of untrusted files may take while it reads a case: 5 s, 1 GiB, the case's folder, no code."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SECONDS = 5.0  # of the CPU: the machine may be busy
TRACED_SECONDS = 120.0  # a function is called at every line
# By the clock a process is ended after ten times as many: in C code no signal's handler runs.
MEMORY = 1 << 30
CODE = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
        "socket.getaddrinfo", "pickle.find_class")  # fmt: skip
# What Python and its packages read of themselves and of the machine.
LIBRARIES = tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix, Path(__file__).parents[2], "/usr/lib")))
MACHINE = (
    "/proc/",
    "/sys/",
    "/dev/null",
    "/dev/urandom",
    "/dev/zero",
    "/etc/localtime",
    "/usr/share/zoneinfo",
)


class Fault(Exception):
    """A reader did what it must not do."""


class TooLong(BaseException):
    """The time of a case is over."""


class Watch:
    """folder: all that a case may read. temporary: where it may write too, and what is in there read.

    evaluates: whether the reader may make code out of text (a template's). Only one in a process.
    """

    def __init__(self, folder: Path, temporary: Path, *, evaluates: bool) -> None:
        self._folder, self._temporary = (os.path.realpath(p) for p in (folder, temporary))
        self._evaluates = evaluates
        self._active = False
        self._seen: list[str] = []
        sys.addaudithook(self._hook)
        signal.signal(signal.SIGPROF, self._stop)

    def limit_memory(self) -> None:
        """From now on the process may take MEMORY more than it has."""
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        self._resident = _resident_bytes()

    @contextmanager
    def case(self, *, traced: bool = False) -> Iterator[None]:
        """Raises Fault for what was done in it, and TooLong. traced: a function is called at every line."""
        self._seconds = TRACED_SECONDS if traced else SECONDS
        self._seen.clear()
        _end_if_hung(10 * self._seconds)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        started = time.process_time()
        self._active = True
        try:
            yield
        finally:
            self._active = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            self._check(time.process_time() - started)

    def _check(self, seconds: float) -> None:
        if self._seen:
            raise Fault("; ".join(dict.fromkeys(self._seen)))
        if seconds > self._seconds:
            raise Fault(f"{seconds:.1f} s of the CPU")
        if (grown := _resident_bytes() - self._resident) > MEMORY:
            raise Fault(f"{grown >> 20} MiB of memory")

    def _stop(self, *_: Any) -> None:
        raise TooLong(f"more than {self._seconds} s of the CPU")

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            self._opened(os.fsdecode(args[0]), args[1], args[2])
        elif event in CODE:
            self._seen.append(f"{event} {str(args)[:200]}")
        elif event == "compile" and not self._evaluates and str(args[1]).startswith("<"):
            self._seen.append(f"evaluates {str(args[0])[:200]!r}")
        elif event == "exec" and self._is_inside(str(getattr(args[0], "co_filename", ""))):
            self._seen.append(f"runs {args[0].co_filename}")

    def _opened(self, path: str, mode: Any, flags: int) -> None:
        real = os.path.realpath(path)
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        if real.startswith(self._temporary + os.sep) or (self._is_inside(real) and not writes):
            return
        if real == "/dev/null" or (not writes and real.startswith((*LIBRARIES, *MACHINE))):
            return
        self._seen.append(f"{'writes' if writes else 'reads'} {path!r} ({real})")

    def _is_inside(self, path: str) -> bool:
        return path == self._folder or path.startswith(self._folder + os.sep)


def _end_if_hung(seconds: float) -> None:
    """It takes a thread, which a busy machine may not have at once."""
    for _ in range(100):
        with suppress(RuntimeError):
            return faulthandler.dump_traceback_later(seconds, exit=True)
        time.sleep(0.1)
    raise RuntimeError("no thread can be started that would end a case that hangs")


def _resident_bytes() -> int:
    """The most that the process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
