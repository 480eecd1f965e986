"""An engine: what is loaded of an artifact, and what can be asked of it."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np

from runtime.core import Core
from runtime.errors import RequestError, ResourceError, check_index
from runtime.executor import Executor
from runtime.kv.cache import Cache
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.log import LogEntry
from runtime.loop import Loop
from runtime.manifest import Model
from runtime.memory.plan import MemoryPlan
from runtime.output import Output
from runtime.prefix import Prefix
from runtime.prompt import Prompt, encode, encode_rest
from runtime.refusal import check_beams, check_request, check_room, check_servable
from runtime.request import Request
from runtime.sampling import Sampling, fresh_seed
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.service import Service
from runtime.speculation.speculation import Speculation
from runtime.stats import Stats, stats
from runtime.step import StepBuffers
from runtime.tokenizer import Tokenizer

DEFAULT = Service()
MAX_INDEX = 2**63 - 1


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
        memory: MemoryPlan | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.memory = memory  # what was planned when it was loaded
        self.model, self.limits, self.tokenizer = model, limits, tokenizer
        self._cache, self._executor = cache, executor
        buffers = StepBuffers(limits, len(cache.groups), model.max_context, cache.block)
        self._core = Core(executor, Scheduler(cache, limits, swap), buffers, speculation)
        self._loop = Loop(self._core)
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        blocks = " and ".join(str(group.num_blocks) for group in self._cache.groups)
        return f"<Engine on {self._executor.target}: {blocks} blocks of {self._cache.block} tokens>"

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
        sampling = Sampling() if sampling is None else sampling
        service = Service(priority, timeout_s, cache_salt)
        prompt_index = check_index("prompt_index", prompt_index, MAX_INDEX)
        return self.enqueue(self.prepare(prompt, sampling, service), sampling, prompt_index, service)

    def prepare(self, prompt: Prompt, sampling: Sampling, service: Service = DEFAULT) -> np.ndarray:
        """Token ids, i32, of a prompt that can be served with this sampling. Raises RequestError."""
        ids = encode(prompt, self.tokenizer, self.model.vocab_size)
        self._check(ids, sampling, service)
        return ids

    def pin(self, prompt: Prompt, *, priority: int = 0, cache_salt: str = "") -> Prefix:
        """Compute a prefix of prompts to come, whole blocks of it, and keep it until it is released.

        prompt: a text, token ids, or the first chat messages. Those who share it find it whatever else was
        computed meanwhile. Raises RequestError where it is shorter than a block or leaves too little memory
        for itself; Prefix.wait raises ResourceError where it leaves too little for what is open.
        """
        sampling, service = Sampling(max_new_tokens=0), Service(priority, cache_salt=cache_salt)
        ids = encode(prompt, self.tokenizer, self.model.vocab_size, answer=False)
        self._check(ids, sampling, service)
        block = self._cache.block
        if not self._cache.prefix_cache or len(ids) < block:
            what, todo = f"{len(ids)} tokens fill no block", f"Give at least {block}, as many as a block has"
            if not self._cache.prefix_cache:
                what, todo = "this engine has no prefix cache", "Load it with prefix_cache=True"
            raise RequestError(f"{what}: nothing can be pinned", where="pin", todo=todo)
        request = self.enqueue(ids[: len(ids) // block * block], sampling, service=service, kept=True)
        return Prefix(request, lambda request: self._loop.ask(self._core.unpin, request))

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
        parent = check_request(parent, "parent")
        sample = check_index("sample", sample, parent.sampling.n - 1)
        sampling = replace(parent.sampling, seed=None, n=1) if sampling is None else sampling
        ids, seq = parent.tokens(sample), parent.sequences[sample]
        known = len(ids) - seq.prompt_tokens
        common = seq.prompt_tokens + (known if keep is None else check_index("keep", keep, known))
        more = encode_rest(append, self.tokenizer, self.model.vocab_size)
        ids = np.concatenate([ids[:common], more])
        service = replace(parent.service, timeout_s=timeout_s)
        self._check(ids, sampling, service)
        return self.enqueue(ids, sampling, parent.prompt_index, service, (seq, common))

    def enqueue(
        self,
        ids: np.ndarray,
        sampling: Sampling,
        prompt_index: int = 0,
        service: Service = DEFAULT,
        origin: tuple[Sequence, int] | None = None,
        kept: bool = False,
    ) -> Request:
        """Queue token ids that prepare() returned. origin: see Request. kept: as a prefix that is pinned.

        Raises EngineError when closed, and in a fork of the engine's process, which lacks its threads.
        """
        number, now, timeout_s = next(self._numbers), time.monotonic(), service.timeout_s
        order = (service.rank(number), number)
        request = Request(
            sampling,
            fresh_seed() if sampling.seed is None else sampling.seed,
            [
                self._sequence((*order, i), ids, sampling, service, kept)
                for i in range(sampling.num_sequences)
            ],
            self._ends(sampling),
            self,
            service=service,
            number=number,
            prompt_index=prompt_index,
            submitted_s=now,
            deadline_s=math.inf if timeout_s is None else now + timeout_s,
            origin=origin,
        )
        self._loop.start(self._pin if kept else self._add, request)
        return request

    def cancel(self, request: Request) -> None:
        """See Request.cancel."""
        self._loop.ask(self._core.cancel, check_request(request), if_open=True)

    def stats(self) -> Stats:
        """A snapshot; the engine does not stop for it."""
        return stats(self._core)

    def log(self, since: int = 0) -> list[LogEntry]:
        """What happened to requests that they did not ask for (prefix hits, copies, evictions, preemptions,
        swaps), from the entry of this number on; the last 4096 are kept."""
        return self._core.log.since(check_index("since", since, MAX_INDEX))

    def close(self) -> None:
        """Stop after the step that runs; requests that are not finished fail. Free what was loaded.

        Any thread may close, and again. In a forked process there is nothing to stop.
        """
        if self._loop.is_foreign:
            return
        self._loop.close()
        with self._loop.alone():
            try:
                if self._core.speculation is not None:
                    self._core.speculation.close()
            finally:
                self._executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        eos = () if sampling.ignore_eos else self.model.eos_token_ids
        return frozenset(sampling.stop_token_ids).union(eos)

    def _sequence(
        self,
        order: tuple[int, int, int],
        ids: np.ndarray,
        sampling: Sampling,
        service: Service,
        kept: bool,
    ) -> Sequence:
        return Sequence(
            order,
            ids,
            sampling.max_new_tokens,
            self.model.max_context,
            Output(self.tokenizer.detokenizer() if self.tokenizer else None, sampling.stop),
            score=sampling.prompt_logprobs is not None and order[2] == 0,
            salt=service.salt,
            kept=kept,
        )

    def _check(self, ids: np.ndarray, sampling: Sampling, service: Service) -> None:
        model, limits = self.model, self.limits
        check_servable(ids, sampling, model, self.tokenizer is not None)
        check_beams(sampling, len(self._ends(sampling)), model.vocab_size, limits.max_requests)
        pins, step_tokens = self._cache.pins, limits.max_step_tokens
        check_room(ids, sampling, service, model.max_context, self._cache, step_tokens, pins)

    # What the engine's thread does when it is asked to.

    def _add(self, request: Request) -> None:
        if self._cache.pins:  # perhaps since it was checked
            self._check_room(request)
        self._core.add(request)

    def _pin(self, request: Request) -> None:
        self._core.pin(request)
        try:
            for other in self._loop.open:
                self._check_room(other)
        except RequestError as error:
            todo = "Pin it when they are done, or load with more kv_memory or kv_blocks"
            raise ResourceError(
                f"a pinned prefix of {request.sequences[0].num_tokens} tokens leaves too little of the KV "
                f"cache to open requests ({error.what})",
                where="pin",
                todo=todo,
            ) from error

    def _check_room(self, request: Request) -> None:
        seq, pins = request.sequences[0], self._cache.pins.without(request.sequences[0])
        context, step_tokens = self.model.max_context, self.limits.max_step_tokens
        check_room(seq.prompt, request.sampling, request.service, context, self._cache, step_tokens, pins)
