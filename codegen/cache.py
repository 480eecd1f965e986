"""What was built before, found by content: a folder of files, each named by the hash of all it was made from.

A file holds a line with the SHA-256 of what follows it. One that is damaged is built again and replaced; a
folder that cannot be written, or is full, costs time and nothing else. Several processes may share it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

DEFAULT_LIMIT = 2 << 30  # bytes
ONE_HOUR_S = 60 * 60
KINDS = ("objects", "kernels", "rebuilt")  # the folders in it; nothing else there is touched
_MAGIC = b"octavo-cache 1 "
_OURS = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{8})?|\.[0-9a-f]{16}\.part")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Cache:
    """Contents by kind and key. folder: None keeps nothing. limit: bytes beyond which the oldest go.

    note is called once, with a line, if the folder cannot be used. hits and misses are counted.
    """

    def __init__(self, folder: Path | None, limit: int = DEFAULT_LIMIT) -> None:
        self.folder, self.limit = folder if limit else None, limit
        self.note: Callable[[str], None] = lambda text: None
        self.hits = self.misses = 0
        self._lock = threading.Lock()
        self._is_broken = False

    def get(self, kind: str, key: str) -> bytes | None:
        """What was put, or None; it counts as used now."""
        found = None if self.folder is None else _content(self._file(kind, key))
        with self._lock:
            self.hits += found is not None
            self.misses += found is None
        if found is not None:
            with suppress(OSError):
                os.utime(self._file(kind, key))
        return found

    def put(self, kind: str, key: str, content: bytes) -> None:
        """At once: another process sees all of it or nothing."""
        if self.folder is None or self._is_broken:
            return
        file = self._file(kind, key)
        partial = file.with_name(f".{secrets.token_hex(8)}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            partial.replace(file)
        except OSError as error:
            self._give_up(error)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove what was used longest ago until the rest is within the limit, and what was half written."""
        if self.folder is None:
            return
        entries = sorted(_entries(self.folder))
        held = sum(num_bytes for _, num_bytes, _ in entries)
        for used, num_bytes, path in entries:
            if path.name.endswith(".part") and time.time() - used > ONE_HOUR_S:
                _remove(path)
            elif held > self.limit:
                _remove(path)
                held -= num_bytes

    def _file(self, kind: str, key: str) -> Path:
        assert self.folder is not None
        return self.folder / kind / key

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            first, self._is_broken = not self._is_broken, True
        if first:
            self.note(
                f"the cache {self.folder} cannot be written ({error.strerror or error}): the next compile "
                "builds again. Set OCTAVO_CACHE to a folder with room, or --no-cache"
            )


def default_cache() -> Cache:
    """In cache_folder(), of $OCTAVO_CACHE_LIMIT. Raises ValueError where that is no size."""
    return Cache(cache_folder(), cache_limit())


def cache_folder() -> Path | None:
    """$OCTAVO_CACHE, by default octavo in the user's cache folder; None for a user without a home."""
    if given := os.environ.get("OCTAVO_CACHE"):
        return Path(given)
    try:
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(user) / "octavo"


def cache_limit() -> int:
    """Bytes. Raises ValueError."""
    text = os.environ.get("OCTAVO_CACHE_LIMIT", "")
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg]i?b)?", text.strip(), re.IGNORECASE)
    if not text.strip():
        return DEFAULT_LIMIT
    if found is None:
        raise ValueError(f"OCTAVO_CACHE_LIMIT={text!r}: not a size. Give bytes, or a text like 2GiB")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def _content(file: Path) -> bytes | None:
    """What a file of the cache holds, if it is whole."""
    with suppress(OSError):
        head, _, content = file.read_bytes().partition(b"\n")
        if head == _MAGIC + hashlib.sha256(content).hexdigest().encode():
            return content
    return None


def _entries(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """(last use, bytes, path) of each entry: a file, or a folder that goes as a whole."""
    for path in (path for kind in KINDS for path in (folder / kind).glob("*") if _OURS.fullmatch(path.name)):
        with suppress(OSError):
            files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
            yield path.lstat().st_mtime, sum(p.lstat().st_size for p in files), path


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
