"""Writing a file that is whole or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from compiler.errors import CompileError


def write_whole(path: Path, text: str) -> None:
    """Replaces a file in one step. A link, a pipe or a device stays (/dev/stdout, say), and is written to.

    Raises what check_place does, OSError of this path.
    """
    check_place(path)
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(path, text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # and not of the part


def check_place(path: Path) -> None:
    """Raises CompileError where no file can be written: before the work, which may be long."""
    if path.is_dir():
        raise CompileError("it is a directory", where=str(path), todo="Name a file in it")
    if not path.parent.is_dir():
        raise CompileError("there is no such directory", where=str(path.parent), todo="Make it first")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".partial-{os.getpid()}-{secrets.token_hex(4)}")  # a name as long as it may be
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
