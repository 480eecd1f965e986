"""A submitted request, as its caller sees it from any thread: iterate, wait, await, cancel."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from numbers import Real
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from runtime.completion import Completion, Event
from runtime.errors import RequestError, check_index, shown
from runtime.sampling import Sampling
from runtime.sequence import Sequence
from runtime.service import Service

if TYPE_CHECKING:
    from runtime.beams import Beams


class Owner(Protocol):
    """The engine, as a request asks it for things."""

    def cancel(self, request: Request) -> None: ...

    def fork(
        self,
        parent: Request,
        sampling: Sampling | None,
        *,
        append: str | Seq[int],
        sample: int,
        keep: int | None,
        timeout_s: float | None,
    ) -> Request: ...


LONGEST_S = 1e9  # that a lock can be waited for: 30 years


class Request:
    """One prompt with its sampling, `sampling.n` samples, each a sequence; of beam search, each beam is one.

    Iterating (or `async for`) gives its events from the first on, as they come, and raises its error if it
    fails. `await request` is `result()`. As a context manager (`with` or `async with`) it is cancelled at the
    end, where it is not finished by then.

    number: as in the engine's log. origin: from whose blocks it starts, while that one holds them, and how
    many tokens they have in common. submitted_s, deadline_s: of the monotonic clock.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        sequences: list[Sequence],
        ends: frozenset[int],
        owner: Owner,
        *,
        service: Service = Service(),  # noqa: B008 - frozen
        number: int = 0,
        prompt_index: int = 0,
        submitted_s: float = 0.0,
        deadline_s: float = math.inf,
        origin: tuple[Sequence, int] | None = None,
    ) -> None:
        self.sampling, self.seed, self.number, self.prompt_index = sampling, seed, number, prompt_index
        self.sequences, self.ends, self.submitted_s = sequences, ends, submitted_s
        self.service, self.deadline_s, self.origin = service, deadline_s, origin
        self.beams: Beams | None = None  # the core's
        for seq in sequences:
            seq.request = self
        self._owner = owner
        self._emitted = [0] * len(sequences)  # tokens of each sample in its events
        self._lock = threading.RLock()
        self._finished = threading.Condition(self._lock)
        self._events: list[Event] = []
        self._completions: dict[int, Completion] = {}
        self._error: Exception | None = None
        self._wakers: list[Callable[[], Any]] = []

    def __repr__(self) -> str:
        prompt, n = self.sequences[0].prompt_tokens, self.sampling.n
        state = "failed" if self._error is not None else "done" if self.done else "open"
        return f"<Request {self.number}: {prompt} prompt tokens, {n} sample{'s' * (n > 1)}, {state}>"

    @property
    def done(self) -> bool:
        """Whether all its samples are finished, or it failed."""
        return self._error is not None or len(self._completions) == self.sampling.n

    def cancel(self) -> None:
        """Stop soon; what is not finished ends with the reason "cancelled" and keeps what it has."""
        self._owner.cancel(self)

    def fork(
        self,
        sampling: Sampling | None = None,
        *,
        append: str | Seq[int] = (),
        sample: int = 0,
        keep: int | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """A new request that goes on from here: from a sample's prompt and output so far, at any time.

        It gives what a request gives whose prompt is all of these tokens, and costs next to nothing while
        this one still holds their blocks: it shares them. sampling: by default this one's, with a new seed.
        append: a text or token ids that come next. keep: output tokens to keep (default all). Raises
        RequestError.
        """
        return self._owner.fork(self, sampling, append=append, sample=sample, keep=keep, timeout_s=timeout_s)

    def tokens(self, sample: int = 0) -> np.ndarray:
        """The prompt and a sample's output so far (of beam search: in the end): i32, a copy.

        Raises RequestError where there is no such sample.
        """
        sample = check_index("sample", sample, self.sampling.n - 1)
        with self._lock:
            seq, completion = self.sequences[sample], self._completions.get(sample)
            if self.sampling.beams > 1 and completion is not None:
                return np.concatenate([seq.prompt, np.array(completion.token_ids, np.int32)])
            return seq.ids[: seq.prompt_tokens + self._emitted[sample]].copy()

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.done:
            self.cancel()

    async def __aenter__(self) -> Request:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()

    def results(self, timeout_s: float | None = None) -> list[Completion]:
        """All samples, in order, once they are finished. Raises its error, or TimeoutError."""
        with self._finished:
            if not self._finished.wait_for(lambda: self.done, _waitable(timeout_s)):
                raise TimeoutError(f"request not finished after {timeout_s} s")
        self.check()
        return [self._completions[i] for i in range(self.sampling.n)]

    def result(self, timeout_s: float | None = None) -> Completion:
        """The completion of a request for one sample."""
        self._check_single("results()")
        return self.results(timeout_s)[0]

    def __iter__(self) -> Iterator[Event]:
        changes: SimpleQueue[None] = SimpleQueue()
        wake, seen = partial(changes.put, None), 0
        self.watch(wake)
        try:
            while True:
                changes.get()
                events, done = self.since(seen)
                yield from events
                seen += len(events)
                if done:
                    break
        finally:
            self.unwatch(wake)
        self.check()

    async def __aiter__(self) -> AsyncIterator[Event]:
        import asyncio  # here: importing the runtime stays light

        ready, seen = asyncio.Event(), 0
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, ready.set)
        self.watch(wake)
        try:
            while True:
                ready.clear()
                events, done = self.since(seen)
                for event in events:
                    yield event
                seen += len(events)
                if done:
                    break
                if not events:
                    await ready.wait()
        finally:
            self.unwatch(wake)
        self.check()

    async def all(self) -> list[Completion]:
        """All samples, in order, as results()."""
        async for _ in self:
            pass
        return self.results()

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._wait().__await__()

    async def _wait(self) -> Completion:
        self._check_single("all()")
        return (await self.all())[0]

    def _check_single(self, instead: str) -> None:
        if self.sampling.n > 1:
            raise RequestError(f"it has {self.sampling.n} samples", where="result()", todo=f"Use {instead}")

    def since(self, seen: int) -> tuple[list[Event], bool]:
        """Events from the `seen`-th on, and whether there will be no more."""
        with self._lock:
            return self._events[seen:], self.done

    def watch(self, wake: Callable[[], Any]) -> None:
        """Call `wake` now and whenever `since` has more to say, from any thread; until unwatch."""
        with self._lock:
            self._wakers.append(wake)
            wake()

    def unwatch(self, wake: Callable[[], Any]) -> None:
        with self._lock:
            self._wakers.remove(wake)

    def check(self) -> None:
        """Raise its error, if it failed."""
        if self._error is not None:
            raise self._error

    # What the engine's thread says.

    def emit(self, event: Event, completion: Completion | None = None) -> None:
        """Add an event; a sample's last one comes with its completion."""
        with self._lock:
            self._events.append(event)
            self._emitted[event.sample_index] += event.token_id is not None
            if completion is not None:
                self._completions[event.sample_index] = completion
            self._wake()

    def fail(self, error: Exception) -> None:
        with self._lock:
            if not self.done:
                self._error = error
            self._wake()

    def _wake(self) -> None:
        if self.done:
            self._finished.notify_all()
        for wake in tuple(self._wakers):  # one may unwatch itself
            try:
                wake()
            except BaseException:  # an event loop that was closed meanwhile, or a fault of the watcher's own
                pass


def _waitable(timeout_s: float | None) -> float | None:
    """Raises RequestError for what is no time to wait."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, Real) or isinstance(timeout_s, bool) or not timeout_s >= 0:
        todo = "Use a number of seconds, or None"
        raise RequestError(f"timeout_s = {shown(timeout_s)}", where="request", todo=todo)
    return float(min(timeout_s, LONGEST_S))
