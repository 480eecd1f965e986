"""What a checkpoint holds, read from its headers alone, in well under a second and without torch.

It serves to say beforehand what a compile will take. Nothing is refused here: of what cannot be read, nothing
is known, and the import says what is wrong with it.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from compiler.checkpoint import open_checkpoint
from compiler.errors import CompileError

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
MAX_ITEMS = 1 << 24  # of a GGUF file's arrays and tables that are walked through
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by the type's number
_STRING, _ARRAY = 8, 9
_NUMBERS = {4: "<I", 5: "<i", 10: "<Q", 11: "<q"}


@dataclass(frozen=True)
class Survey:
    """kind: huggingface, gguf, module, shapes, or unknown. num_bytes: of the files of weights. counts: of
    elements of each tensor; empty where there are shapes alone. max_context: the model's own; None where it
    is not known.
    """

    kind: str
    num_bytes: int = 0
    counts: Sequence[int] = ()
    max_context: int | None = None

    @property
    def num_weights(self) -> int:
        return sum(self.counts)


def survey(source: Any, *, weights: bool = True) -> Survey:
    """source: as compiler.compile takes it. weights: False for shapes alone."""
    if not isinstance(source, str | Path):
        if not hasattr(source, "parameters"):
            return Survey("unknown")
        return Survey("module", counts=[int(p.numel()) for p in source.parameters()])
    path = Path(source)
    with suppress(CompileError, OSError, ValueError, RecursionError, TypeError, AttributeError):
        if path.is_dir():
            return _directory(path, weights)
        if path.suffix == ".gguf":
            return _gguf(path)
    return Survey("unknown")


def _directory(path: Path, weights: bool) -> Survey:
    context = _context(path / "config.json")
    if not weights:
        return Survey("shapes", max_context=context)
    source, files = open_checkpoint(path)
    counts = [prod(int(n) for n in source.type(name).shape) for name in source.names]
    return Survey("huggingface", sum(f.stat().st_size for f in files), counts, context)


def _context(config: Path) -> int | None:
    found = json.loads(config.read_text())
    found = {**found, **(found.get("text_config") or {})}
    return next((found[key] for key in POSITIONS if isinstance(found.get(key), int)), None)


def _gguf(path: Path) -> Survey:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            context, counts = _Gguf(data).read()
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a GGUF file") from error
    return Survey("gguf", path.stat().st_size, counts, context)


class _Gguf:
    """A file's header, from its specification (ggml's docs/gguf.md), little-endian, versions 2 and 3."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[int | None, list[int]]:
        """The context length, and the number of elements of each tensor."""
        magic, version, num_tensors, num_fields = self._unpack("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3) or max(num_tensors, num_fields) > MAX_ITEMS:
            raise ValueError("not a GGUF header")
        context = None
        for _ in range(num_fields):
            key, kind = self._string(), self._unpack("<I")[0]
            if key.endswith(b".context_length") and kind in _NUMBERS:
                context = self._unpack(_NUMBERS[kind])[0]
            else:
                self._skip(kind)
        return context, [self._tensor() for _ in range(num_tensors)]

    def _tensor(self) -> int:
        self._string()
        (rank,) = self._unpack("<I")
        if rank > 8:
            raise ValueError("a tensor of so many axes")
        shape = self._unpack(f"<{rank}Q")
        self._unpack("<IQ")  # its type and where it lies
        return prod(shape)

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            item, count = self._unpack("<IQ")
            self._skip_items(item, count)
        else:
            self._move(_SIZES[kind])

    def _skip_items(self, kind: int, count: int) -> None:
        if kind in _SIZES:
            self._move(_SIZES[kind] * count)
            return
        if kind != _STRING or count > MAX_ITEMS:
            raise ValueError("an array of arrays, or too long")
        for _ in range(count):
            self._string()

    def _string(self) -> bytes:
        (length,) = self._unpack("<Q")
        start = self._at
        self._move(length)
        return self._data[start : self._at] if length < 1 << 16 else b""

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._move(struct.calcsize(form))
        return found

    def _move(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._data):
            raise ValueError("it ends in its header")
