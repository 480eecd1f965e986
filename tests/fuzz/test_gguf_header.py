"""A GGUF file's counts, lengths and offsets are compared with the file before they are believed."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compiler.importers.gguf_header import check_header
from compiler.weights import WeightError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: list[int], offset: int, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    *,
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    magic: bytes = b"GGUF",
    version: int = 3,
    data: int = 128,
) -> bytes:
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")] if keys is None else keys
    tensors = [tensor("a", [8], 0), tensor("b", [4, 2], 32)] if tensors is None else tensors
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    found = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return found + bytes(-len(found) % 32) + bytes(data)


def array(kind: int, count: int, content: bytes) -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, count) + content


def test_a_good_one_passes(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(file())
    check_header(tmp_path / "m.gguf")


WRONG: dict[str, Callable[[], bytes]] = {
    "starts with": lambda: file(magic=b"GGML"),
    "version 1": lambda: file(version=1),
    "big-endian": lambda: file(version=3 << 24),
    "announces .* tensors": lambda: file(num_tensors=2**60),
    "announces .* key-values": lambda: file(num_keys=2**60),
    "truncated": lambda: file(keys=[text("k") + struct.pack("<IQ", 8, 2**60)]),
    "announces .* elements": lambda: file(keys=[array(4, 2**60, b"")]),
    "truncated: .* bytes": lambda: file(keys=[array(4, 2**20, b"")]),
    "announces .* bytes of a key": lambda: file(keys=[struct.pack("<Q", 2**63)]),
    "nested too deep": lambda: file(keys=[array(9, 1, struct.pack("<IQIQ", 9, 1, 9, 1))]),
    "value of type 77": lambda: file(keys=[text("k") + struct.pack("<I", 77)]),
    "key occurs twice": lambda: file(keys=[text("k") + struct.pack("<IB", 0, 1)] * 2),
    "alignment is 0": lambda: file(keys=[text("general.alignment") + struct.pack("<II", 4, 0)]),
    "alignment is 48": lambda: file(keys=[text("general.alignment") + struct.pack("<II", 4, 48)]),
    "alignment is None": lambda: file(keys=[text("general.alignment") + struct.pack("<I", 8) + text("x")]),
    "unknown type, 99": lambda: file(tensors=[tensor("a", [8], 0, 99)]),
    "cannot have the shape .* in Q4_1": lambda: file(tensors=[tensor("a", [33], 0, 3)]),
    "cannot have the shape": lambda: file(tensors=[tensor("a", [2**62, 2**62], 0)]),
    "cannot have the shape.*0": lambda: file(tensors=[tensor("a", [8, 0], 0)]),
    "has 4000000000 axes": lambda: file(tensors=[text("a") + struct.pack("<I", 4_000_000_000)]),
    "not aligned": lambda: file(tensors=[tensor("a", [8], 4)]),
    "overlap": lambda: file(tensors=[tensor("a", [16], 0), tensor("b", [8], 32)]),
    "ends at": lambda: file(tensors=[tensor("a", [8], 2**40)]),
    "one name": lambda: file(tensors=[tensor("a", [8], 0), tensor("a", [8], 32)]),
    "not UTF-8": lambda: file(keys=[struct.pack("<Q", 1) + b"\xff"]),
    "too few": lambda: b"GGUF",
}


@pytest.mark.parametrize("message", list(WRONG))
def test_what_it_claims_is_checked(tmp_path: Path, message: str) -> None:
    (tmp_path / "m.gguf").write_bytes(WRONG[message]())
    before = time.process_time()
    with pytest.raises(WeightError, match=message) as caught:
        check_header(tmp_path / "m.gguf")
    assert caught.value.todo and time.process_time() - before < 2


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = file(data=64)
    for size in range(len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(WeightError):
            check_header(tmp_path / "m.gguf")
