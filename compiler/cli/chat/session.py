"""A conversation with an engine: each turn is one request, whose prompt is all messages so far.

The keys and values of earlier turns are found again by their tokens, so that a turn computes what is new
alone.
"""

from __future__ import annotations

import bisect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from compiler.cli.chat.conversation import Conversation
from compiler.cli.chat.settings import Settings
from compiler.cli.chat.tokens import Spellings
from runtime.completion import Completion
from runtime.engine import Engine
from runtime.errors import RequestError
from runtime.request import Request
from runtime.sampling import Sampling

Show = Callable[[str], Any]  # takes the pieces of an answer as they come
NO_ROOM = "/undo takes the last turn back, and /clear begins anew"


@dataclass(frozen=True)
class Turn:
    """One answer. full: it ended because the context, or the KV cache, held no more."""

    completion: Completion
    full: bool

    @property
    def tokens_per_s(self) -> float | None:
        """Without the first token, which waits for the prompt; None where there is no other."""
        timings, others = self.completion.timings, len(self.completion.token_ids) - 1
        if timings.first_token_s is None or others < 1:
            return None
        return others / max(timings.total_s - timings.first_token_s, 1e-9)


class Session:
    """Needs an engine with a tokenizer that has a chat template."""

    def __init__(self, engine: Engine, settings: Settings, system: str | None = None) -> None:
        self.engine, self.settings = engine, settings
        self.conversation = Conversation().with_system(system)
        self.turns: list[Turn] = []  # since the session began
        assert engine.tokenizer is not None
        self._spellings = Spellings(engine.tokenizer.decode)
        self._again = 0  # how often the last answer was asked for again

    @property
    def num_tokens(self) -> int:
        """Tokens of the context that the conversation takes."""
        if not self.conversation.messages:
            return 0
        return len(self._spellings.respelt(self._encode(self.conversation, answer=False)))

    def ask(self, text: str, show: Show) -> Turn:
        """Send a message. Where no answer comes of it the conversation stays as it was.

        Raises OctavoError."""
        self._again = 0
        return self._answer(self.conversation.asked(text), self.settings, show)

    def retry(self, show: Show) -> Turn:
        """Another answer in the place of the last: with the next seed where one is set."""
        settings = self.settings
        if settings.temperature == 0:
            todo = "Use /set temperature 0.7, or another above 0"
            raise RequestError("at temperature 0 the answer is the same", where="/retry", todo=todo)
        asked = self.conversation.unanswered()
        self._again += 1
        if settings.seed is not None:
            settings = replace(settings, seed=(settings.seed + self._again) % 2**64)
        return self._answer(asked, settings, show)

    def _answer(self, asked: Conversation, settings: Settings, show: Show) -> Turn:
        ids = self._spellings.respelt(self._encode(asked))
        most = self._room(ids, settings)
        request = self.engine.submit(ids, settings.sampling(most), timeout_s=settings.timeout)
        with request, stopped_by_interrupt(request):
            for event in request:
                show(event.text)
        completion = request.result()
        full = completion.finish_reason == "length" and most != settings.max_new_tokens
        turn = Turn(completion, full)
        if completion.token_ids:
            ends = self.engine.model.eos_token_ids
            self._spellings.add(ids + [token for token in completion.token_ids if token not in ends])
            self.conversation = asked.answered(completion.text)
            self.turns.append(turn)
        return turn

    def _encode(self, conversation: Conversation, answer: bool = True) -> list[int]:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.encode_chat(conversation.messages, answer=answer)

    def _room(self, ids: list[int], settings: Settings) -> int:
        """The most tokens that the answer may have. Raises RequestError where there is no room for one."""
        context = self.engine.model.max_context
        if len(ids) >= context:
            what = f"{len(ids)} tokens with this message, and the context holds {context}"
            raise RequestError(what, where="conversation", todo=f"Make it shorter: {NO_ROOM}")
        refusal = self._refusal(ids, settings.sampling(1))
        if refusal is not None:
            raise RequestError(refusal.what, where="conversation", todo=f"{refusal.todo}; {NO_ROOM}")
        wanted = context - len(ids)
        if settings.max_new_tokens is not None:
            wanted = min(wanted, settings.max_new_tokens)
        if self._refusal(ids, settings.sampling(wanted)) is None:
            return wanted
        return (
            bisect.bisect_left(
                range(1, wanted),
                True,
                key=lambda n: self._refusal(ids, settings.sampling(n + 1)) is not None,
            )
            + 1
        )

    def _refusal(self, ids: list[int], sampling: Sampling) -> RequestError | None:
        try:
            self.engine.prepare(ids, sampling)
        except RequestError as error:
            return error
        return None


@contextmanager
def stopped_by_interrupt(request: Request) -> Iterator[None]:
    """Within it the first Ctrl-C cancels the request; another is a KeyboardInterrupt, as outside of it."""

    def stop(signum: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        request.cancel()

    before = signal.signal(signal.SIGINT, stop) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
