"""A pinned prefix, a system prompt for example: computed once, and never evicted until it is let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.request import Request


class Prefix:
    """What Engine.pin returns. `with engine.pin(...)` waits until it is computed, and lets it go at the end.

    num_tokens: how many of its tokens are pinned, whole blocks of them.
    """

    def __init__(self, request: Request, release: Callable[[Request], Any]) -> None:
        self._request, self._release = request, release
        self.num_tokens = request.sequences[0].num_tokens

    def __repr__(self) -> str:
        return f"<Prefix of {self.num_tokens} tokens, {'ready' if self.ready else 'not ready'}>"

    def wait(self, timeout_s: float | None = None) -> Prefix:
        """Until it is computed. Raises ResourceError where there is no room for it, or TimeoutError."""
        self._request.results(timeout_s)
        return self

    @property
    def ready(self) -> bool:
        """Whether it is computed, or has failed."""
        return self._request.done

    def release(self) -> None:
        """Let it go: it stays findable, like any prefix, until its blocks are needed. Again: nothing."""
        self._release(self._request)

    def __enter__(self) -> Prefix:
        try:
            return self.wait()
        except BaseException:  # an interrupt
            self.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.release()
