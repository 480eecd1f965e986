"""Memory taken from the machine in large pieces."""

from __future__ import annotations

import mmap

import numpy as np

from runtime.errors import ResourceError


def anonymous(size: int, what: str) -> np.ndarray:
    """`size` zero bytes, page-aligned and private, taken from the machine only when touched.

    In huge pages where the system grants them: streaming through small ones costs address translations.
    Raises ResourceError.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=flags)
    except (OSError, OverflowError) as error:
        todo = "Use smaller max_step_tokens, max_requests or kv_memory"
        refused = f"{size} bytes for {what} cannot be mapped ({error})"
        raise ResourceError(refused, where="this machine", todo=todo) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    return np.frombuffer(memory, np.uint8)
