"""Files of a checkpoint directory: nothing outside of it is read, and nothing that is larger than expected.

A directory of the Hugging Face hub's cache (models--NAME/snapshots/REVISION) is made of symbolic links to
models--NAME/blobs, which are followed; any other link out of a checkpoint is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from compiler.errors import CompileError
from runtime.errors import shown

READ = frozenset(
    {".json", ".jinja", ".safetensors", ".model", ".txt", ".tiktoken", ".bin"}
)  # by us or by transformers
MAX_CONFIG_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 128 << 20
COPY = "Copy the files themselves into the directory"


def check_links(directory: Path) -> None:
    """Raises CompileError where a file that an importer may read lies elsewhere."""
    roots = [os.path.realpath(directory), *_blobs(directory)]
    for entry in os.scandir(directory):
        if not entry.is_symlink() or Path(entry.name).suffix not in READ:
            continue
        real = os.path.realpath(entry.path)
        if any(real.startswith(root + os.sep) for root in roots) and is_file(Path(entry.path)):
            continue
        what = f"{shown(entry.name)} is a symbolic link to {shown(real, 200)}, not to a file in the directory"
        raise CompileError(what, where=str(directory), todo=COPY)


def _blobs(directory: Path) -> list[str]:
    """Where the hub's cache keeps a snapshot's files."""
    snapshots = Path(os.path.realpath(directory)).parent
    is_cache = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    return [os.path.realpath(snapshots.parent / "blobs")] if is_cache else []


def is_file(path: Path) -> bool:
    """Whether there is a regular file; False for a name that no file can have."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # too long a name; a NUL in it
        return False


def read_file(path: Path, most: int) -> bytes:
    """Raises CompileError where it is longer, or no regular file: a pipe would never end."""
    if not is_file(path):
        raise CompileError("not a regular file", where=str(path), todo="Download the checkpoint again")
    size = path.stat().st_size
    if size > most:
        raise CompileError(
            f"{size:,} bytes; at most {most:,} are read",
            where=str(path),
            todo="Download the checkpoint again",
        )
    return path.read_bytes()
