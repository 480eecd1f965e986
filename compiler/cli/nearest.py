"""What was probably meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def or_nearest(name: str, names: Iterable[str]) -> str:
    """What to do instead: the nearest of the names, or all of them where none is near."""
    known = list(names)
    near = difflib.get_close_matches(name, known, 1)
    return f"The nearest is {near[0]}" if near else f"There are {', '.join(known)}"
