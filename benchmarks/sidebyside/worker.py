"""One engine in a process of its own, told over pipes what to run.

The parent writes a JSON object a line to the worker's standard input and reads one back for each. Loading and
warming up takes some engines a minute, so a worker lives for a whole comparison. While the other one works it
is stopped by a signal: a pool of threads that spins when idle costs nobody anything.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from sidebyside.workloads import Times

HOME = Path(__file__).parent.parent
PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Turn:
    times: Times
    tokens: list[list[int]]  # the new ones, by request


class Session(Protocol):
    """An engine with a model loaded, made by `Session(model, num_threads, dtype)`.

    dtype: of what is not quantised, f32 or bf16.
    """

    @property
    def facts(self) -> Mapping[str, Any]:
        """What to keep with the figures: versions at least."""
        ...

    def run(self, context: list[int], prompts: list[list[int]], new_tokens: int) -> Turn:
        """Complete prompts greedily, each after `context`, which is cached before the clock starts."""
        ...


class PrefixCachingSession:
    """A session of an engine that finds a prompt's start in its own cache."""

    def __init__(self) -> None:
        self._context: list[int] = []

    def run(self, context: list[int], prompts: list[list[int]], new_tokens: int) -> Turn:
        if context and context != self._context:
            self.complete([context], 1)
            self._context = context
        return self.complete([context + prompt for prompt in prompts], new_tokens)

    def complete(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        """Greedily, all at once, and timed."""
        raise NotImplementedError


def serve(make: Any) -> None:
    """Be the worker. make: the Session class."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped worker would outlive its parent
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the engine prints must not mix with replies
    session: Any = None
    for line in sys.stdin:
        call: dict[str, Any] = json.loads(line)
        name = call.pop("call")
        if name == "load":
            session = make(Path(call["model"]), call["num_threads"], call["dtype"])
            reply: Any = dict(session.facts)
        else:
            reply = getattr(session, name)(**call)
        print(json.dumps(asdict(reply) if isinstance(reply, Turn) else reply), file=replies)


class WorkerFailed(Exception):
    pass


class Worker:
    """The parent's end. Use it as a context manager. name: of a module in `workers`."""

    def __init__(
        self, python: Path, name: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._name, self._log_path = name, log
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python.absolute(), "-m", f"sidebyside.workers.{name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=HOME,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # its children stop with it
        )

    def load(self, model: Path, num_threads: int, dtype: str) -> dict[str, Any]:
        """The session's facts."""
        return self.call("load", model=str(model.absolute()), num_threads=num_threads, dtype=dtype)

    def run(self, context: Sequence[int], prompts: Sequence[Sequence[int]], new_tokens: int) -> Turn:
        reply = self.call("run", context=context, prompts=prompts, new_tokens=new_tokens)
        return Turn(Times(**reply["times"]), reply["tokens"])

    def call(self, name: str, **arguments: Any) -> Any:
        """Have the worker do one thing, awake only meanwhile. Raises WorkerFailed."""
        assert self._process.stdin and self._process.stdout
        os.killpg(self._process.pid, signal.SIGCONT)
        print(json.dumps({"call": name, **arguments}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(f"{self._name} failed in {name!r}: {self._last_words()} ({self._log_path})")
        os.killpg(self._process.pid, signal.SIGSTOP)
        return json.loads(line)

    def _last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
