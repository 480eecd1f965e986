"""GGUF files: header, key-values, tensors and quantised data, with wrong counts and lengths in every part."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from compiler.importers.gguf import _open, stored_rows
from tests.fuzz import mutate
from tests.fuzz.fuzzer import Fuzzer

KINDS = {
    **{0: (1, 4), 1: (1, 2), 30: (1, 2), 28: (1, 8), 24: (1, 1)},
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 8: (32, 34), 20: (32, 18), 39: (32, 17)},
    **{10: (256, 84), 12: (256, 144), 14: (256, 210)},
}  # from a type to the elements and bytes of a group
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
KEYS: dict[str, tuple[int, Any]] = {
    "general.architecture": (8, "llama"),
    "llama.context_length": (4, 64),
    "llama.embedding_length": (4, 256),
    "llama.block_count": (4, 1),
    "llama.feed_forward_length": (4, 256),
    "llama.attention.head_count": (4, 4),
    "llama.attention.head_count_kv": (4, 4),
    "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
    "llama.vocab_size": (4, 32),
    "llama.rope.freq_base": (6, 1e4),
    "general.alignment": (4, 32),
    "an.array": (9, (4, [1, 2, 3])),
    "texts": (9, (8, ["a", "b"])),
}
TENSORS = (
    *("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"),
    *("blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.attn_norm.weight"),
)


class Wrong:
    """Now and then a number other than the right one."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._rate = rng, rng.choice((0, 0.005, 0.02, 0.1))

    def __call__(self, number: int, bits: int = 64) -> int:
        wrong = self._rng.random() < self._rate
        return (mutate.integer(self._rng) if wrong else number) % (1 << bits)


def text(wrong: Wrong, value: str | bytes) -> bytes:
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return struct.pack("<Q", wrong(len(data))) + data


def value(wrong: Wrong, kind: int, content: Any) -> bytes:
    if kind in SCALARS:
        return _scalar(SCALARS[kind], content)
    if kind == 8:
        return text(wrong, content if isinstance(content, str) else "x")
    inner, items = content if isinstance(content, tuple) else (4, [])
    head = struct.pack("<IQ", wrong(inner, 32), wrong(len(items)))
    return head + b"".join(value(wrong, inner, item) for item in items)


def _scalar(form: str, content: Any) -> bytes:
    try:
        return struct.pack(f"<{form}", content)
    except (struct.error, OverflowError):
        return bytes(struct.calcsize(form))


def make(rng: Random, folder: Path) -> None:
    wrong = Wrong(rng)
    keys = dict(KEYS)
    for _ in range(rng.choice((0, 0, 1, 2))):
        _mutate_key(rng, keys)
    tensors = [
        (name, rng.choice(list(KINDS))) for name in rng.sample(TENSORS, rng.randrange(len(TENSORS) + 1))
    ]
    body = b"".join(
        text(wrong, key) + struct.pack("<I", wrong(kind, 32)) + value(wrong, kind, content)
        for key, (kind, content) in keys.items()
    )
    infos, data = _tensors(rng, wrong, tensors)
    magic = b"GGUF" if rng.random() < 0.98 else rng.randbytes(4)
    head = magic + struct.pack(
        "<IQQ", wrong(rng.choice((3, 3, 2)), 32), wrong(len(tensors)), wrong(len(keys))
    )
    found = head + body + infos
    found += bytes(-len(found) % 32) + data
    if rng.random() < 0.1:
        found = mutate.flipped(rng, found)
    if rng.random() < 0.1:
        found = found[: rng.randrange(len(found) + 1)]
    (folder / "m.gguf").write_bytes(found)


def _mutate_key(rng: Random, keys: dict[str, tuple[int, Any]]) -> None:
    key = rng.choice(list(keys))
    kind = rng.choice((0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 99))
    options = (
        *(
            mutate.integer(rng),
            rng.choice(mutate.TEXTS),
            float("nan"),
            (9, [(9, [(9, [])])]),
            (9, [(4, [1])]),
        ),
        *((8, [rng.choice(mutate.TEXTS)] * 50), (4, list(range(1000)))),
    )
    if rng.random() < 0.2:
        del keys[key]
    elif rng.random() < 0.2:
        keys[rng.choice(mutate.TEXTS)] = (kind, rng.choice(options))
    else:
        keys[key] = (kind if rng.random() < 0.5 else keys[key][0], rng.choice(options))


def _tensors(rng: Random, wrong: Wrong, tensors: Sequence[tuple[str, int]]) -> tuple[bytes, bytes]:
    infos, data = b"", b""
    for name, kind in tensors:
        shapes = ([256], [256, 3], [256, 2, 2], [512, 32])
        shape = rng.choice(([], [1], [256, 0], [256, 1, 1, 1, 1]) if rng.random() < 0.03 else shapes)
        group, size = KINDS[kind]
        content = rng.randbytes(int(np.prod(shape)) // group * size)
        infos += text(wrong, name) + struct.pack("<I", wrong(len(shape), 32))
        infos += b"".join(struct.pack("<Q", wrong(n)) for n in shape)
        infos += struct.pack("<IQ", wrong(kind, 32), wrong(len(data)))
        data += content + bytes(-len(content) % 32)
    return infos, data


def read(folder: Path) -> str:
    """Every tensor has as many elements as its shape says, and every field is read."""
    path = folder / "m.gguf"
    reader = _open(path)
    for field in reader.fields.values():
        try:
            field.contents()
        except UnicodeDecodeError:
            continue
    read = 0
    for tensor in reader.tensors:
        read += stored_rows(path, tensor, slice(None)).size == int(np.prod(tensor.shape, dtype=object))
    assert read == len(reader.tensors), "a tensor of another size"
    return f"accepted, {'some' if read else 'no'} tensors"


FUZZERS = (Fuzzer("gguf", make, read, ("compiler/importers/gguf_header.py",)),)
