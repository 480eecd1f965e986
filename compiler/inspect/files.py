"""Writing a file that is whole or not there."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from compiler.errors import CompileError


def write_whole(path: Path, text: str) -> None:
    """Replaces what was there in one step. Raises CompileError where the directory is missing, OSError."""
    if not path.parent.is_dir():
        raise CompileError("there is no such directory", where=str(path.parent), todo="Make it first")
    part = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
