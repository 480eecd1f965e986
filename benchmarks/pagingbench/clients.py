"""What random clients do to an engine: threads and tasks that submit, iterate, fork, cancel and leave."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pagingbench.faults import Injected
from runtime import Completion, Engine, EngineError, RequestError, Sampling
from runtime.request import Request

SYSTEMS, SALTS = 3, ("", "", "", "other")
MOST_SAMPLES = 4


@dataclass(frozen=True)
class Sizes:
    """prompt, new: most tokens. system: tokens of the prompts' shared starts."""

    prompt: int
    new: int
    system: int


@dataclass
class Shared:
    """What all clients work on. open: requests that are not done; ended: what may be compared."""

    engine: Engine
    sizes: Sizes
    systems: list[list[int]]
    end: threading.Event = field(default_factory=threading.Event)
    pause: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: list[Request] = field(default_factory=list)
    ended: list[tuple[Sampling, Completion]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)

    def watch(self, request: Request) -> Request:
        with self.lock:
            self.open.append(request)
            self.outcomes["requests"] += 1
        return request

    def settle(self) -> None:
        """Take what is done off the open ones, and count how it ended."""
        with self.lock:
            done = [request for request in self.open if request.done]
            self.open = [request for request in self.open if not request.done]
        for request in done:
            try:
                completions = request.results()
            except Exception as error:
                self.note(error)
                continue
            for each in completions:
                self.outcomes[each.finish_reason] += 1
                self.ended.append((request.sampling, each))
        del self.ended[:-400]

    def note(self, error: Exception) -> None:
        """Injected faults and refusals are expected, and rows that were made NaN."""
        injected = isinstance(error, Injected | RequestError) or "NaN" in str(error)
        self.outcomes[type(error).__name__ if injected else "unexpected"] += 1
        if not injected:
            self.unexpected.append(repr(error))


class Client:
    """One after the other, things that a client may do, until the end."""

    def __init__(self, shared: Shared, seed: int) -> None:
        self.shared, self.rng = shared, random.Random(seed)

    def run(self) -> None:
        deeds = (self.wait, self.stream, self.leave, self.forget, self.cancel, self.branch, self.branch_after)
        while not self.shared.end.is_set():
            if self.shared.pause.is_set():
                time.sleep(0.01)
                continue
            try:
                self.rng.choice(deeds)()
            except (EngineError, RequestError):
                self.shared.outcomes["seen by clients"] += 1  # counted when the request settles
            except Exception as error:
                self.shared.note(error)

    def submit(self) -> Request:
        rng, sizes, engine = self.rng, self.shared.sizes, self.shared.engine
        options: dict[str, Any] = {"priority": rng.choice((0, 0, 0, 1, -2)), "cache_salt": rng.choice(SALTS)}
        if rng.random() < 0.1:
            options["timeout_s"] = rng.uniform(0.001, 2.0)
        prompt: Any = self.prompt()
        if engine.tokenizer is not None and rng.random() < 0.3:
            prompt = "Once upon a time " * rng.randint(1, max(1, sizes.prompt // 16))
        return self.shared.watch(engine.submit(prompt, self.sampling(), **options))

    def prompt(self) -> list[int]:
        """Some start of a system prompt, and tokens of its own."""
        rng, sizes, vocab = self.rng, self.shared.sizes, self.shared.engine.model.vocab_size
        length = max(1, min(sizes.prompt, round(rng.expovariate(3 / sizes.prompt))))
        start = rng.choice(self.shared.systems)[: rng.choice((0, length, sizes.system))][: length - 1]
        return start + [rng.randrange(vocab) for _ in range(length - len(start))]

    def sampling(self) -> Sampling:
        rng, sizes = self.rng, self.shared.sizes
        stop = ("e ",) if self.shared.engine.tokenizer is not None and rng.random() < 0.1 else ()
        return Sampling(
            max_new_tokens=rng.choice((0, 1, rng.randint(1, sizes.new), sizes.new)),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            seed=rng.getrandbits(32),
            n=rng.choice((1, 1, 1, 1, 2, MOST_SAMPLES)),
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            ignore_eos=rng.random() < 0.5,
            stop=stop,
        )

    def wait(self) -> None:
        self.submit().results()

    def stream(self) -> None:
        for _ in self.submit():
            pass

    def leave(self) -> None:
        """In the middle of iteration, which cancels it."""
        with self.submit() as request:
            for at, _ in enumerate(request):
                if at >= self.rng.randint(0, 8):
                    break

    def forget(self) -> None:
        """Leave a few without cancelling."""
        for _ in range(self.rng.randint(1, 4)):
            self.submit()
        time.sleep(self.rng.uniform(0, 0.2))

    def cancel(self) -> None:
        requests = [self.submit() for _ in range(self.rng.randint(1, 3))]
        for request in requests:
            time.sleep(self.rng.uniform(0, 0.05))
            request.cancel()

    def branch(self) -> None:
        """Fork it while it runs, and perhaps the fork too."""
        request = self.submit()
        for at, _ in enumerate(request):
            if at >= self.rng.randint(0, 8):
                break
        fork = self.fork(request)
        with suppress(RequestError):
            self.fork(fork).results()
        request.results()

    def branch_after(self) -> None:
        request = self.submit()
        with suppress(EngineError):
            request.results()
        self.fork(request).results()

    def fork(self, request: Request) -> Request:
        sample = self.rng.randrange(len(request.sequences))
        more = [
            self.rng.randrange(self.shared.engine.model.vocab_size) for _ in range(self.rng.choice((0, 0, 3)))
        ]
        sampling = replace(self.sampling(), prompt_logprobs=None, max_new_tokens=self.rng.randint(1, 8))
        return self.shared.watch(request.fork(sampling, append=more, sample=sample))


class AsyncClients:
    """Tasks of event loops that end while requests run on."""

    def __init__(self, shared: Shared, seed: int, tasks: int) -> None:
        self.shared, self.tasks = shared, tasks
        self.clients = [Client(shared, seed + i) for i in range(tasks)]

    def run(self) -> None:
        while not self.shared.end.is_set():
            if self.shared.pause.is_set():
                time.sleep(0.01)
            else:
                asyncio.run(self.together())

    async def together(self) -> None:
        for error in await asyncio.gather(*map(self.one, self.clients), return_exceptions=True):
            if isinstance(error, Exception) and not isinstance(
                error, EngineError | RequestError | TimeoutError
            ):
                self.shared.note(error)

    async def one(self, client: Client) -> None:
        request, patience = client.submit(), client.rng.choice((0.05, 0.5, 60.0))
        async with asyncio.timeout(patience):
            async for _ in request:
                if client.rng.random() < 0.02:
                    return


def start(targets: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads
