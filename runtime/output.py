"""The output of one sample as it grows: tokens, text, log-probabilities."""

from __future__ import annotations

from runtime.completion import TokenLogprob
from runtime.detokenizer import Detokenizer, StopMatcher
from runtime.speculation.tally import Tally


class Output:
    """detokenizer: None where there is no tokenizer; the text stays empty then."""

    def __init__(self, detokenizer: Detokenizer | None, stops: tuple[str, ...]) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.score: float | None = None  # of beam search
        self.draft: Tally | None = None  # from its first draft on
        self._detokenizer, self._matcher = detokenizer, StopMatcher(stops)
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, token_id: int, *, silent: bool) -> tuple[str, bool]:
        """Add a token. Returns the text that is certain now, and whether a stop text was met.

        silent: an end token, which has no text.
        """
        self.token_ids.append(token_id)
        if silent or self._detokenizer is None:
            return "", False
        return self._match(self._detokenizer.push(token_id))

    def flush(self) -> tuple[str, bool]:
        """The rest of the text, at the end."""
        if self._detokenizer is None:
            return "", False
        text, stopped = self._match(self._detokenizer.flush())
        if stopped:
            return text, True
        rest = self._matcher.flush()
        self._texts.append(rest)
        return text + rest, False

    def _match(self, text: str) -> tuple[str, bool]:
        certain, stopped = self._matcher.push(text)
        self._texts.append(certain)
        return certain, stopped
