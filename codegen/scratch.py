"""Folders that hold what is being written, named after the process they belong to.

A process that is killed leaves its folder behind. Whoever comes next removes it: at once where the process is
known to have ended, and a day after its last change where that cannot be seen from here, because it ran on
another machine, in another container, or before a restart.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "octavo-"
ONE_DAY_S = 24 * 60 * 60
_TAG = re.compile(r"(?P<place>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}")


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for temporary files, removed at the end. Raises OSError where there is no room for one."""
    remove_abandoned(Path(tempfile.gettempdir()), PREFIX)
    folder = Path(tempfile.gettempdir(), PREFIX + owner_tag())
    with Removed(folder):
        folder.mkdir(mode=0o700)
        yield folder


class Removed:
    """A context at whose end a folder and all in it is removed, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Path:
        return self.folder

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def owner_tag() -> str:
    """PLACE-PID-START-RANDOM: this process, which no later one of the same number is taken for."""
    pid = os.getpid()
    return f"{_place()}-{pid}-{_start(pid)}-{secrets.token_hex(4)}"


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove our folders PREFIX + owner tag whose process is gone."""
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            if entry.name.startswith(prefix) and is_abandoned(Path(entry.path), entry.name[len(prefix) :]):
                shutil.rmtree(entry.path, ignore_errors=True)


def is_abandoned(folder: Path, tag: str) -> bool:
    """Whether a folder is ours, and the process that its tag names does not write to it any more."""
    found = _TAG.fullmatch(tag)
    with suppress(OSError):
        if found is None or folder.is_symlink() or folder.lstat().st_uid != os.getuid():
            return False
        if found["place"] != _place():
            return time.time() - _last_change(folder) > ONE_DAY_S
        return _start(int(found["pid"])) != int(found["start"])
    return False


@functools.cache
def _place() -> str:
    """Where process numbers mean the same: a machine since its start, and of it a container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known: list[object] = [platform.node()]
    with suppress(OSError):
        known += [os.stat("/proc/self/ns/pid").st_ino, boot.read_text()]
    return hashlib.sha256(repr(known).encode()).hexdigest()[:8]


def _start(pid: int) -> int:
    """When a process started, in the system's ticks; -1 where there is none, 0 where it cannot be seen."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        return int(after_name.split()[19])
    except OSError:
        return 0 if not Path("/proc/self/stat").exists() and _is_running(pid) else -1


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _last_change(folder: Path) -> float:
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
