"""The hashes of docs/artifact.md: of a file in chunks, so that many cores can check it, and of the manifest.

The compiler writes them and the runtime compares them, both with these functions.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime import machine

CHUNK_BYTES = 8 << 20


def file_hash(path: Path, report: Callable[[int], None] = lambda hashed: None) -> str:
    """SHA-256 of the concatenated SHA-256 digests of the file's chunks (none for an empty file), in hex.

    report(hashed) is told the bytes that are done.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, CHUNK_BYTES)
        if len(starts) < 2:
            digests = [_chunk_digest(file.fileno(), at) for at in starts]
        else:
            from concurrent.futures import ThreadPoolExecutor  # here: importing the runtime stays light

            with ThreadPoolExecutor(min(len(starts), machine.default_threads())) as pool:
                digests: list[bytes] = []
                for digest in pool.map(lambda at: _chunk_digest(file.fileno(), at), starts):
                    digests.append(digest)
                    report(min(size, len(digests) * CHUNK_BYTES))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _chunk_digest(fd: int, at: int) -> bytes:
    return hashlib.sha256(os.pread(fd, CHUNK_BYTES, at)).digest()


def manifest_digest(raw: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON without the key `digest`, as "sha256:...".

    Raises ValueError on text that is not Unicode, RecursionError on deep nesting.
    """
    rest = {key: value for key, value in raw.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()
