"""The engine's thread: it does what others ask of the core, and steps while there is work."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from runtime.core import Core
from runtime.errors import EngineError
from runtime.request import Request

Call = Callable[[Request], None]  # made by the thread, between steps; what it raises fails the request alone


class Loop:
    """Any thread may call its methods. A fork of the process that made it lacks the thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._wake = threading.Condition()
        self._calls: list[tuple[Call, Request]] = []
        self._open: set[Request] = set()
        self._deadline_s = math.inf  # the next one of an open request
        self._closing: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    @property
    def is_foreign(self) -> bool:
        """Whether this is a fork of the process that loaded the engine. Its locks may be held for ever."""
        return os.getpid() != self._process

    @property
    def open(self) -> list[Request]:
        """Requests that are not done. For the thread itself."""
        with self._wake:
            return [request for request in self._open if not request.done]

    def start(self, call: Call, request: Request) -> None:
        """Open a request. Raises EngineError when closed, and in a fork of the engine's process."""
        if self.is_foreign:
            raise EngineError(
                "the engine was loaded by another process",
                where=f"process {os.getpid()}",
                todo="Load the artifact after the fork",
            )
        with self._wake:
            if self._closing is not None:
                raise self._closing.with_traceback(None)  # else it keeps what all callers had at hand
            self._open.add(request)
            self._deadline_s = min(self._deadline_s, request.deadline_s)
            self._ask(call, request)

    def ask(self, call: Call, request: Request, *, if_open: bool = False) -> None:
        """if_open: not of requests that are done."""
        if self.is_foreign:
            return
        with self._wake:
            if request in self._open or not if_open:
                self._ask(call, request)

    def close(self) -> None:
        """Stop after the step that runs; requests that are not finished fail."""
        with self._wake:
            self._closing = self._closing or EngineError(
                "it is closed", where="engine", todo="Load the artifact again"
            )
            self._wake.notify()
        self._thread.join()

    def alone(self) -> threading.Condition:
        """The lock: as a context manager, nobody else is in a method."""
        return self._wake

    def _ask(self, call: Call, request: Request) -> None:
        self._calls.append((call, request))
        self._wake.notify()

    def _run(self) -> None:
        try:
            while self._attend():
                self._core.step()
        except BaseException as error:  # a fault of the engine itself: nothing after it can be trusted
            with self._wake:
                self._closing = EngineError(
                    f"it broke down ({error!r})", where="engine", todo="Load the artifact again"
                )
        with self._wake:
            for request in self._open:
                self._abandon(
                    request,
                    self._closing
                    or EngineError("it is closed", where="engine", todo="Load the artifact again"),
                )
            self._open.clear()

    def _abandon(self, request: Request, error: Exception) -> None:
        """Whoever waits for it must hear of it, whatever state the core is in."""
        try:
            self._core.fail(request, error)
        except BaseException:
            request.fail(error)

    def _attend(self) -> bool:
        """Take up what is asked for, and timeouts; False when closing. Sleep while there is nothing to do."""
        overdue = self._deadline_s <= time.monotonic()
        if self._core.busy and not self._calls and self._closing is None and not overdue:
            return True  # as nearly always while there is work; what comes now is seen before the next step
        with self._wake:
            if not self._core.busy:
                self._forget()
            self._wake.wait_for(lambda: self._calls or self._core.busy or self._closing)
            calls, self._calls = self._calls, []
            if self._closing is not None:
                return False
        for call, request in calls:
            self._do(call, request)
        if calls or overdue:
            self._expire()
        return True

    def _do(self, call: Call, request: Request) -> None:
        try:
            call(request)
        except Exception as error:  # of this request alone
            self._core.fail(request, error)

    def _expire(self) -> None:
        """End the requests that are out of time, and forget all that are done."""
        now = time.monotonic()
        for request in [r for r in self.open if r.deadline_s <= now]:
            self._do(self._core.expire, request)
        with self._wake:  # others may have opened some since
            self._forget()

    def _forget(self) -> None:
        """Let go of the requests that are done. With the lock."""
        self._open = {request for request in self._open if not request.done}
        self._deadline_s = min((r.deadline_s for r in self._open), default=math.inf)
