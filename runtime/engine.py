"""An engine: what is loaded of an artifact, and the thread that steps while there are requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from runtime.cache import Cache
from runtime.core import Core
from runtime.errors import EngineError, RequestError
from runtime.executor import Executor
from runtime.manifest import Model
from runtime.output import Output
from runtime.prompt import Prompt, encode
from runtime.request import Request
from runtime.sampling import Sampling, fresh_seed
from runtime.scheduler import Limits, Scheduler
from runtime.sequence import Sequence
from runtime.step import StepBuffers
from runtime.swap import Swap
from runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since loading, and what is held now. blocks: per KV group."""

    target: str  # what runs the steps, as --target spells it
    steps: int
    computed_tokens: int
    output_tokens: int
    finished_samples: int
    failed_requests: int
    step_s: float  # spent in steps, and of that
    forward_s: float  # in the compiled forward; the rest is scheduling, sampling and text
    preemptions: int
    prefix_hit_tokens: int
    copied_blocks: int
    swapped_blocks: int  # kept on the host when their request was preempted
    evicted_blocks: int
    running: int
    waiting: int
    blocks_total: list[int]
    blocks_used: list[int]
    blocks_free: list[int]
    blocks_cached: list[int]  # of the free ones, those that a prefix hit can revive


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
        self._number = 0
        self._closing: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, sampling: Sampling | None = None, *, prompt_index: int = 0) -> Request:
        """Queue a prompt: a text, token ids, or chat messages. Raises RequestError if it cannot be served."""
        sampling = sampling or Sampling()
        return self.enqueue(self.prepare(prompt, sampling), sampling, prompt_index)

    def prepare(self, prompt: Prompt, sampling: Sampling) -> np.ndarray:
        """Token ids, i32, of a prompt that can be served with this sampling. Raises RequestError."""
        ids = encode(prompt, self.tokenizer, self.model.vocab_size)
        self._check(ids, sampling)
        return ids

    def enqueue(self, ids: np.ndarray, sampling: Sampling, prompt_index: int = 0) -> Request:
        """Queue token ids that prepare() returned.

        Raises EngineError when closed, and in a fork of the engine's process, which lacks its threads.
        """
        if self._is_foreign:
            raise EngineError(
                "the engine was loaded by another process",
                where=f"process {os.getpid()}",
                todo="Load the artifact after the fork",
            )
        seed = fresh_seed() if sampling.seed is None else int(sampling.seed)
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        with self._wake:
            if self._closing is not None:
                raise self._closing
            sequences = [self._sequence(i, ids, sampling) for i in range(sampling.n)]
            request = Request(
                sampling,
                seed,
                sequences,
                ends,
                self._cancel,
                prompt_index=prompt_index,
                submitted_s=time.monotonic(),
            )
            self._number += 1
            self._open.add(request)
            self._calls.append((self._core.add, request))
            self._wake.notify()
        return request

    def stats(self) -> Stats:
        """A snapshot; the engine does not stop for it."""
        scheduler, pools = self._core.scheduler, self._cache.pools
        free = [pool.num_free for pool in pools]
        total = [pool.num_blocks for pool in pools]
        return Stats(
            target=self._executor.target,
            **asdict(self._core.counters),
            preemptions=scheduler.preemptions,
            prefix_hit_tokens=self._cache.hit_tokens,
            copied_blocks=self._cache.copied_blocks,
            swapped_blocks=scheduler.swap.swapped_blocks,
            evicted_blocks=sum(pool.evictions for pool in pools),
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            blocks_total=total,
            blocks_used=[t - f for t, f in zip(total, free, strict=True)],
            blocks_free=free,
            blocks_cached=[pool.num_cached for pool in pools],
        )

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

    @property
    def _eos(self) -> frozenset[int]:
        return frozenset(self.model.eos_token_ids)

    def _sequence(self, sample: int, ids: np.ndarray, sampling: Sampling) -> Sequence:
        score = sampling.prompt_logprobs is not None and sample == 0
        output = Output(self.tokenizer.detokenizer() if self.tokenizer else None, sampling.stop)
        order, context = (self._number, sample), self.model.max_context
        return Sequence(order, ids, sampling.max_new_tokens, context, output, score=score)

    def _check(self, ids: np.ndarray, sampling: Sampling) -> None:
        context, vocab_size = self.model.max_context, self.model.vocab_size
        if len(ids) == 0:
            raise RequestError(
                "it has no tokens", where="prompt", todo="Give at least one token, a BOS for example"
            )
        if len(ids) > context:
            raise RequestError(
                f"{len(ids)} tokens; the context holds {context}",
                where="prompt",
                todo="Shorten it, or compile with a larger --max-context",
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError(
                "stop texts need a tokenizer, which this artifact lacks",
                where="sampling",
                todo="Use stop_token_ids",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(sampling, name) or 0) > vocab_size:
                raise RequestError(
                    f"{name} = {getattr(sampling, name)}",
                    where="sampling",
                    todo=f"Use at most {vocab_size}, the vocabulary",
                )
        most = max(len(ids), min(len(ids) + sampling.max_new_tokens, context) - 1)
        if not self._cache.fits(most, self.limits.max_step_tokens):
            blocks = [group.num_blocks for group in self._cache.groups]
            raise RequestError(
                f"{len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} need a KV cache of "
                f"{most} tokens; this engine has {blocks} blocks of {self._cache.block} tokens",
                where="prompt",
                todo="Lower max_new_tokens, or load with more kv_memory or kv_blocks",
            )

    def _cancel(self, request: Request) -> None:
        if self._is_foreign:
            return
        with self._wake:
            if request in self._open:
                self._calls.append((self._core.cancel, request))
                self._wake.notify()

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
        """Take up submissions and cancellations; False when closing."""
        if self._core.busy and not self._calls and self._closing is None:
            return True  # as nearly always while there is work; what comes now is seen before the next step
        with self._wake:
            self._wake.wait_for(lambda: self._calls or self._core.busy or self._closing)
            calls, self._calls = self._calls, []
            if self._closing is not None:
                return False
        for call, request in calls:
            try:
                call(request)
            except Exception as error:  # of this request alone
                self._core.fail(request, error)
        if calls:
            with self._wake:
                self._open = {request for request in self._open if not request.done}
        return True
