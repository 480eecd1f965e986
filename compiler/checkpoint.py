"""The weights of a checkpoint directory: safetensors files, one or several with an index.

The format is read from its specification (8 bytes little-endian header length, JSON header, data); a header
is refused when it is too long, when offsets leave the file, overlap, or disagree with shape and element type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler.files import check_links, is_file, read_file
from compiler.weights import BELONG, Array, WeightError, WeightSource
from ir.types import DType, Tensor
from runtime.errors import shorten, shown

MAX_HEADER_BYTES = 16 << 20  # what JSON of so many bytes becomes in memory is 30 times as much
MAX_INDEX_BYTES = 32 << 20
MAX_AXES = 16
MAX_ITEM_BYTES = 8
AGAIN = "Download the checkpoint again"

_SAFETENSORS_TYPES = {
    "F64": DType.F64,
    "F32": DType.F32,
    "F16": DType.F16,
    "BF16": DType.BF16,
    "F8_E4M3": DType.F8E4M3,
    "I64": DType.I64,
    "I32": DType.I32,
    "I8": DType.I8,
    "U8": DType.U8,
    "BOOL": DType.BOOL,
}


class SafetensorsFile:
    """One .safetensors file, memory-mapped. Raises WeightError on a malformed header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data, self._entries = _open_safetensors(path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def type(self, name: str) -> Tensor:
        if name not in self._entries:
            raise WeightError(f"there is no tensor {name!r}", where=str(self.path), todo=BELONG)
        kind, shape, _, _ = self._entries[name]
        if kind not in _SAFETENSORS_TYPES:
            raise WeightError(
                f"the element type is {shorten(kind)}; {', '.join(_SAFETENSORS_TYPES)} are read",
                where=f"{self.path}, tensor {shown(name)}",
                todo="Save the checkpoint in one of them",
            )
        return Tensor(_SAFETENSORS_TYPES[kind], shape)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self.read(name)[lo:hi]

    def read(self, name: str) -> Array:
        found = self.type(name)
        _, shape, begin, end = self._entries[name]
        return self._data[begin:end].view(found.dtype.numpy).reshape(shape)


class ShardedSource:
    """Safetensors files joined by an index (`model.safetensors.index.json`)."""

    def __init__(self, index: Path) -> None:
        self.index = index
        self._file_of = _read_index(index)
        self._files = {
            name: SafetensorsFile(index.parent / name) for name in sorted(set(self._file_of.values()))
        }
        for tensor, file in self._file_of.items():
            if tensor not in self._files[file]:
                raise WeightError(
                    f"tensor {shown(tensor)} is said to be in {shorten(file)}, which does not hold it",
                    where=str(index),
                    todo=AGAIN,
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise WeightError(f"there is no tensor {name!r}", where=str(self.index), todo=BELONG)
        return self._files[self._file_of[name]]

    def type(self, name: str) -> Tensor:
        return self._file(name).type(name)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self._file(name).rows(name, lo, hi)

    def read(self, name: str) -> Array:
        return self._file(name).read(name)


_Entry = tuple[str, tuple[int, ...], int, int]  # element type, shape, first and last byte in the file


def _open_safetensors(path: Path) -> tuple[Array, dict[str, _Entry]]:
    size = path.stat().st_size
    if size < 8:
        what = f"{size} bytes are too few for a safetensors file: it is truncated"
        raise WeightError(what, where=str(path), todo=AGAIN)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise WeightError(
                f"the header claims {length} bytes; the file has {size} and a header may have at most "
                f"{MAX_HEADER_BYTES}: it is truncated or not a safetensors file",
                where=str(path),
                todo=AGAIN,
            )
        header = _parse_json(path, file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    entries = {name: _entry(path, name, raw, start, size) for name, raw in header.items()}
    _check_overlap(path, entries)
    return np.memmap(path, np.uint8, mode="r"), entries


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} occurs twice")
        found[key] = value
    return found


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        what = f"the header is not valid JSON: {shorten(str(error), 200)}"
        raise WeightError(what, where=str(path), todo=AGAIN) from None
    if not isinstance(found, dict):
        raise WeightError("the header is not a JSON object", where=str(path), todo=AGAIN)
    return found


def _entry(path: Path, name: str, raw: Any, start: int, size: int) -> _Entry:
    where = f"{path}, tensor {shown(name)}"
    try:
        kind, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        if not isinstance(kind, str):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        what = f"needs dtype, shape and data_offsets, not {shown(raw)}"
        raise WeightError(what, where=where, todo=AGAIN) from None
    if len(shape) > MAX_AXES:
        raise WeightError(f"{len(shape)} axes; at most {MAX_AXES} are read", where=where, todo=AGAIN)
    if not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)):
        what = f"shape and offsets must be non-negative integers, not {shown(raw)}"
        raise WeightError(what, where=where, todo=AGAIN)
    if math.prod(n for n in shape if n) * MAX_ITEM_BYTES >= 2**63:  # no array has so many elements
        raise WeightError(f"no tensor has the shape {shown(list(shape))}", where=where, todo=AGAIN)
    if not begin <= end <= size - start:
        what = f"bytes {begin}..{end} are not inside the file's {size - start} bytes of data: it is truncated"
        raise WeightError(what, where=where, todo=AGAIN)
    item = _SAFETENSORS_TYPES[kind].size_bytes if kind in _SAFETENSORS_TYPES else None
    if item is not None and end - begin != math.prod(shape) * item:
        what = f"{shown(list(shape))} of {kind} do not take {end - begin} bytes"
        raise WeightError(what, where=where, todo=AGAIN)
    return kind, shape, start + begin, start + end


def _check_overlap(path: Path, entries: Mapping[str, _Entry]) -> None:
    spans = sorted((begin, end, name) for name, (_, _, begin, end) in entries.items() if end > begin)
    for (_, last, name), (first, _, other) in zip(spans, spans[1:], strict=False):
        if first < last:
            raise WeightError(
                f"tensors {shown(name)} and {shown(other)} overlap", where=str(path), todo=AGAIN
            )


def _read_index(index: Path) -> dict[str, str]:
    mapping = _parse_json(index, read_file(index, MAX_INDEX_BYTES)).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise WeightError("it has no weight_map", where=str(index), todo=AGAIN)
    found: set[str] = set()
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightError(
                f"tensor {shown(name)} is in {shown(file)}, which is not a .safetensors file beside it",
                where=str(index),
                todo=AGAIN,
            )
        if file not in found and not is_file(index.parent / file):
            raise WeightError(
                f"{shorten(file)}, which holds {shown(name)}, is missing",
                where=str(index),
                todo="Download the whole checkpoint",
            )
        found.add(file)
    return mapping


def open_checkpoint(directory: Path) -> tuple[WeightSource, tuple[Path, ...]]:
    """The weights of a checkpoint directory and the files they are in.

    Raises WeightError where there are none, or only pickled ones, which run code when they are read.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    check_links(directory)
    if single.is_file():
        return SafetensorsFile(single), (single,)
    if index.is_file():
        sharded = ShardedSource(index)
        files = sorted({directory / file for file in _read_index(index).values()})
        return sharded, (index, *files)
    others = sorted(directory.glob("*.safetensors"))
    if len(others) == 1:
        return SafetensorsFile(others[0]), (others[0],)
    if others:
        raise WeightError(
            f"there are {len(others)} .safetensors files but no model.safetensors.index.json",
            where=str(directory),
            todo="Download the whole checkpoint",
        )
    pickled = sorted(p.name for s in ("bin", "pt", "pth", "ckpt", "pkl") for p in directory.glob(f"*.{s}"))
    if pickled:
        raise WeightError(
            f"the weights are pickled ({pickled[0]}), and reading a pickle runs the code in it",
            where=str(directory),
            todo="Convert them where you trust them: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT) writes safetensors",
        )
    raise WeightError(
        "there are no weights (model.safetensors) beside config.json",
        where=str(directory),
        todo="Add them, or compile the shapes alone with --no-weights",
    )
