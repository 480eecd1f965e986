"""An engine: what is loaded of an artifact, and the thread that steps while there are requests."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from runtime.core import Core
from runtime.errors import EngineError, RequestError
from runtime.executor import Executor
from runtime.kv.cache import Cache
from runtime.kv.swap import Swap
from runtime.log import LogEntry
from runtime.manifest import Model
from runtime.output import Output
from runtime.prompt import Prompt, encode, encode_rest
from runtime.refusal import check_servable
from runtime.request import Request
from runtime.sampling import Sampling, fresh_seed
from runtime.scheduler import Limits, Scheduler
from runtime.sequence import Sequence
from runtime.service import Service
from runtime.stats import Stats, stats
from runtime.step import StepBuffers
from runtime.tokenizer import Tokenizer


class Engine:
    """Use it as a context manager, or close() it. Any thread may submit."""

    def __init__(
        self,
        executor: Executor,
        model: Model,
        cache: Cache,
        limits: Limits,
        tokenizer: Tokenizer | None = None,
        swap: Swap | None = None,
    ) -> None:
        self.model, self.limits, self.tokenizer = model, limits, tokenizer
        self._cache, self._executor = cache, executor
        buffers = StepBuffers(limits, len(cache.groups), model.max_context, cache.block)
        self._core = Core(executor, Scheduler(cache, limits, swap), buffers)
        self._wake = threading.Condition()
        self._calls: list[tuple[Callable[[Request], None], Request]] = []  # what others want of the core
        self._open: set[Request] = set()
        self._deadline_s = math.inf  # the next one of an open request
        self._number = 0
        self._closing: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        prompt_index: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Queue a prompt: a text, token ids, or chat messages. Raises RequestError if it cannot be served.

        priority, timeout_s, cache_salt: see Service.
        """
        sampling, service = sampling or Sampling(), Service(priority, timeout_s, cache_salt)
        return self.enqueue(self.prepare(prompt, sampling), sampling, prompt_index, service)

    def prepare(self, prompt: Prompt, sampling: Sampling) -> np.ndarray:
        """Token ids, i32, of a prompt that can be served with this sampling. Raises RequestError."""
        ids = encode(prompt, self.tokenizer, self.model.vocab_size)
        self._check(ids, sampling)
        return ids

    def fork(
        self,
        parent: Request,
        sampling: Sampling | None = None,
        *,
        append: Prompt = (),
        sample: int = 0,
        keep: int | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """See Request.fork. Its priority and its salt are the parent's."""
        if not 0 <= sample < len(parent.sequences):
            todo = f"Use 0 to {len(parent.sequences) - 1}"
            raise RequestError(f"there is no sample {sample}", where="fork", todo=todo)
        sampling = sampling or replace(parent.sampling, seed=None, n=1)
        ids, seq = parent.tokens(sample), parent.sequences[sample]
        known = len(ids) - seq.prompt_tokens
        if keep is not None and not 0 <= keep <= known:
            raise RequestError(f"keep = {keep}", where="fork", todo=f"Use 0 to {known}, the tokens so far")
        ids = ids[: seq.prompt_tokens + (known if keep is None else keep)]
        more = encode_rest(append, self.tokenizer, self.model.vocab_size)
        ids = np.concatenate([ids, more])
        self._check(ids, sampling)
        service = replace(parent.service, timeout_s=timeout_s)
        return self.enqueue(ids, sampling, parent.prompt_index, service, seq)

    def enqueue(
        self,
        ids: np.ndarray,
        sampling: Sampling,
        prompt_index: int = 0,
        service: Service = Service(),  # noqa: B008 - frozen
        parent: Sequence | None = None,
    ) -> Request:
        """Queue token ids that prepare() returned. parent: whose first tokens they are.

        Raises EngineError when closed, and in a fork of the engine's process, which lacks its threads.
        """
        if self._is_foreign:
            raise EngineError(
                "the engine was loaded by another process",
                where=f"process {os.getpid()}",
                todo="Load the artifact after the fork",
            )
        now, timeout_s = time.monotonic(), service.timeout_s
        with self._wake:
            if self._closing is not None:
                raise self._closing
            request = Request(
                sampling,
                fresh_seed() if sampling.seed is None else sampling.seed,
                [self._sequence(i, ids, sampling, service) for i in range(sampling.n)],
                self._ends(sampling),
                self,
                service=service,
                number=self._number,
                prompt_index=prompt_index,
                submitted_s=now,
                deadline_s=math.inf if timeout_s is None else now + timeout_s,
                parent=parent,
            )
            self._number += 1
            self._open.add(request)
            self._deadline_s = min(self._deadline_s, request.deadline_s)
            self._calls.append((self._core.add, request))
            self._wake.notify()
        return request

    def cancel(self, request: Request) -> None:
        """See Request.cancel."""
        if self._is_foreign:
            return
        with self._wake:
            if request in self._open:
                self._calls.append((self._core.cancel, request))
                self._wake.notify()

    def stats(self) -> Stats:
        """A snapshot; the engine does not stop for it."""
        return stats(self._core)

    def log(self, since: int = 0) -> list[LogEntry]:
        """What happened to requests that they did not ask for (prefix hits, copies, evictions, preemptions,
        swaps), from the entry of this number on; the last 4096 are kept."""
        return self._core.log.since(since)

    def close(self) -> None:
        """Stop after the step that runs; requests that are not finished fail. Free what was loaded.

        Any thread may close, and again. In a forked process there is nothing to stop.
        """
        if self._is_foreign:
            return
        with self._wake:
            self._closing = self._closing or EngineError(
                "the engine is closed", todo="Load the artifact again"
            )
            self._wake.notify()
        self._thread.join()
        with self._wake:
            self._executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_foreign(self) -> bool:
        """Whether this is a fork of the process that loaded the engine. Its locks may be held for ever."""
        return os.getpid() != self._process

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        eos = () if sampling.ignore_eos else self.model.eos_token_ids
        return frozenset(sampling.stop_token_ids).union(eos)

    def _sequence(self, sample: int, ids: np.ndarray, sampling: Sampling, service: Service) -> Sequence:
        return Sequence(
            (service.rank(self._number), self._number, sample),
            ids,
            sampling.max_new_tokens,
            self.model.max_context,
            Output(self.tokenizer.detokenizer() if self.tokenizer else None, sampling.stop),
            score=sampling.prompt_logprobs is not None and sample == 0,
            salt=service.salt,
        )

    def _check(self, ids: np.ndarray, sampling: Sampling) -> None:
        step_tokens, has_tokenizer = self.limits.max_step_tokens, self.tokenizer is not None
        check_servable(len(ids), sampling, self.model, self._cache, step_tokens, has_tokenizer)

    def _run(self) -> None:
        """The engine's thread: do what was asked for, run a step, again; sleep when idle."""
        while self._attend():
            try:
                self._core.step()
            except Exception as error:  # a fault of the engine itself: nothing after it can be trusted
                with self._wake:
                    self._closing = EngineError(
                        f"the engine broke down ({error!r})", todo="Load the artifact again"
                    )
        with self._wake:
            for request in self._open:
                self._core.fail(request, self._closing or EngineError("the engine is closed"))
            self._open.clear()

    def _attend(self) -> bool:
        """Take up submissions, cancellations and timeouts; False when closing."""
        overdue = self._deadline_s <= time.monotonic()
        if self._core.busy and not self._calls and self._closing is None and not overdue:
            return True  # as nearly always while there is work; what comes now is seen before the next step
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._core.busy or self._closing)
            calls, self._calls = self._calls, []
            if self._closing is not None:
                return False
        for call, request in calls:
            self._do(call, request)
        if calls or overdue:
            self._expire()
        return True

    def _do(self, call: Callable[[Request], None], request: Request) -> None:
        try:
            call(request)
        except Exception as error:  # of this request alone
            self._core.fail(request, error)

    def _expire(self) -> None:
        """End the requests that are out of time, and forget those that are done."""
        now = time.monotonic()
        for request in [r for r in self._open if r.deadline_s <= now]:
            self._do(self._core.expire, request)
        with self._wake:
            self._open = {request for request in self._open if not request.done}
            self._deadline_s = min((r.deadline_s for r in self._open), default=math.inf)
