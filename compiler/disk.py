"""The disk that a compile writes to: whether it has room, and what to say where it cannot be written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codegen.scratch import PREFIX
from compiler.errors import CompileError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)
TEMPORARY_BYTES = 50_000_000  # of what compilers keep while they run


def check_room(need_bytes: int, free_bytes: int, out: Path) -> None:
    """Raises CompileError where the artifact `out` does not fit."""
    if free_bytes < need_bytes:
        raise CompileError(
            f"it takes about {megabytes(need_bytes)} and the disk has {megabytes(free_bytes)} free",
            where=str(out),
            todo="Free some, or choose another place with -o",
        )


@contextmanager
def refused_writes(out: Path, need_bytes: int) -> Iterator[None]:
    """Raises CompileError where something within could not be written: the place, and what it takes.

    out: the artifact that is written, of about so many bytes.
    """
    try:
        yield
    except OSError as error:
        is_locked = error.errno in LOCKED and _is_written(str(error.filename or ""), out)
        if error.errno in FULL or is_locked:
            raise _refused(error, out, need_bytes) from error
        raise


def _refused(error: OSError, out: Path, need_bytes: int) -> CompileError:
    is_temporary = str(error.filename or "").startswith(os.path.join(tempfile.gettempdir(), PREFIX))
    place = Path(tempfile.gettempdir()) if is_temporary else out
    need = f"it takes about {megabytes(TEMPORARY_BYTES if is_temporary else need_bytes)}"
    free = megabytes(shutil.disk_usage(place if is_temporary else out.parent).free)
    what = f"{need} and {free} are free" if error.errno in FULL else "it cannot be written"
    todo = "Set TMPDIR to another folder" if is_temporary else "Choose another place with -o"
    return CompileError(
        f"{(error.strerror or 'no space left on device').lower()}: {what}",
        where=str(place),
        todo=f"Free some, or {todo[0].lower()}{todo[1:]}" if error.errno in FULL else todo,
    )


def _is_written(file: str, out: Path) -> bool:
    return f".{out.name}.partial-" in file or file.startswith(os.path.join(tempfile.gettempdir(), PREFIX))


def megabytes(num_bytes: int) -> str:
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:,.1f} MB"
    return f"{num_bytes / 1e9:,.1f} GB"
