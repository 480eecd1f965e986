"""How a request is served: what changes when its tokens come, and never which."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from numbers import Real
from typing import Any

from runtime.errors import RequestError, shown

MAX_PRIORITY = 1000
LEAD = 16  # requests submitted before it that one of the next higher priority overtakes


@dataclass(frozen=True)
class Service:
    """Checked when made (RequestError).

    priority: each level overtakes the 16 requests submitted last before it, so that nobody waits for ever;
    negative ones let others pass. timeout_s: from submission on; what is not finished then ends with the
    reason "timeout". cache_salt: requests of different salts share no cached prefix, and so cannot find out
    by the time that it takes what others have asked.
    """

    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        most = MAX_PRIORITY
        if type(self.priority) is not int or not -most <= self.priority <= most:
            raise _bad("priority", self.priority, f"an integer from {-most} to {most}")
        timeout: Any = self.timeout_s
        if timeout is not None and not (_is_number(timeout) and 0 < timeout <= sys.float_info.max):
            raise _bad("timeout_s", timeout, "a number of seconds above 0, or None")
        if not isinstance(self.cache_salt, str):
            raise _bad("cache_salt", self.cache_salt, "a text")

    @property
    def salt(self) -> bytes:
        return self.cache_salt.encode("utf-8", "surrogatepass")

    def rank(self, number: int) -> int:
        """Place in the queue of the request with this number; smaller is served first."""
        return number - LEAD * self.priority


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _bad(name: str, value: Any, want: str) -> RequestError:
    return RequestError(f"{name} = {shown(value)}", where="request", todo=f"Use {want}")
