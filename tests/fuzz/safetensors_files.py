"""Safetensors files and indices of shards, as the compiler reads a checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from compiler.checkpoint import open_checkpoint
from compiler.weights import WeightError, WeightSource
from ir.graph import Weight
from tests.fuzz import mutate
from tests.fuzz.fuzzer import Fuzzer

BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
}
SHAPES: tuple[list[int], ...] = ([], [0], [1], [3, 5], [2, 3, 4], [16], [0, 2**40], [1, 1, 1, 1, 1, 1, 1, 1])
INDEX = "model.safetensors.index.json"


def header(rng: Random, names: list[str]) -> tuple[dict[str, Any], int]:
    """A valid one, and the bytes of its data."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.3 else {}
    at = 0
    for name in names:
        kind, shape = rng.choice(list(BYTES)), rng.choice(SHAPES)
        end = at + int(np.prod(shape, dtype=object)) * BYTES[kind]
        found[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    return found, at


def file(rng: Random, names: list[str], times: int | None = None) -> bytes:
    """A file of these tensors; often one that is not valid."""
    tree, size = header(rng, names)
    choice = rng.randrange(8)
    if 2 <= choice < 6:
        tree = mutate.mutated(rng, tree, times)
    text = mutate.raw_json(rng, tree) if choice >= 3 else mutate.plain_json(tree)
    length = len(text) if rng.random() < 0.9 else mutate.integer(rng) % 2**64
    data = length.to_bytes(8, "little") + text + rng.randbytes(size)
    if rng.random() < 0.15:
        data = mutate.flipped(rng, data, within=len(text) + 8)
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.05 else data


def names_of(rng: Random) -> list[str]:
    return [
        f"{rng.choice(('a.weight', 'b', 'model.layers.0.q', 'ü'))}{i}" for i in range(rng.randrange(1, 5))
    ]


def make_one(rng: Random, folder: Path) -> None:
    path = folder / rng.choice(("model.safetensors", "model.safetensors", "other.safetensors"))
    path.write_bytes(file(rng, names_of(rng)))
    if rng.random() < 0.05:
        mutate.replace_by_link(rng, path, folder.parent / "outside")
    if rng.random() < 0.05:
        (folder / rng.choice(("pytorch_model.bin", "second.safetensors"))).write_bytes(b"\x80\x04N.")


def make_shards(rng: Random, folder: Path) -> None:
    shards = {f"model-{i}-of-2.safetensors": names_of(rng) for i in range(rng.randrange(1, 4))}
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    for shard, names in shards.items():
        path = folder / shard
        path.write_bytes(file(rng, names) if rng.random() < 0.1 else _valid(rng, names))
        if rng.random() < 0.04:
            mutate.replace_by_link(rng, path, folder.parent / "outside")
    tree: Any = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    if rng.random() < 0.3:
        name = rng.choice(list(weight_map))
        weight_map[name] = rng.choice((*mutate.TEXTS, *_ways_out(folder), "MODEL-0-OF-2.safetensors"))
    if rng.random() < 0.4:
        tree = mutate.mutated(rng, tree)
    (folder / INDEX).write_bytes(
        mutate.raw_json(rng, tree) if rng.random() < 0.5 else mutate.plain_json(tree)
    )
    if rng.random() < 0.05:
        mutate.replace_by_link(rng, folder / INDEX, folder.parent / "outside")
    if rng.random() < 0.1:
        (folder / "linked").symlink_to(folder.parent / "outside")


def _valid(rng: Random, names: list[str]) -> bytes:
    tree, size = header(rng, names)
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + rng.randbytes(size)


def _ways_out(folder: Path) -> tuple[str, ...]:
    name = "secret.safetensors"
    return (
        *(f"../outside/{name}", f"linked/{name}", f"{folder.parent}/outside/{name}", f"linked/../{name}"),
        *(f"..\\outside\\{name}", "model.safetensors\0.safetensors", ".safetensors", "x/" * 600 + name),
        *("..safetensors", INDEX),
    )


def read_all(folder: Path) -> str:
    """Every tensor is as long as its type and shape say, and rows are those of the whole."""
    source, files = open_checkpoint(folder)
    read = 0
    for name in source.names:
        try:
            read += read_tensor(source, name)
        except WeightError:
            if not files:
                raise
    return f"accepted, {'all' if read == len(source.names) else 'some'} tensors read"


def read_tensor(source: WeightSource, name: str) -> bool:
    found = source.type(name)
    array = source.read(name)
    assert array.shape == found.shape and array.dtype == found.dtype.numpy, (name, array.shape, found)
    assert Weight(name, found).type == found
    if found.shape:
        size = int(found.shape[0])
        assert source.rows(name, size // 2, size).shape == (size - size // 2, *found.shape[1:])
    array.tobytes()  # each byte is there
    return True


_READERS = ("compiler/checkpoint.py",)
FUZZERS = (
    Fuzzer("safetensors", make_one, read_all, _READERS),
    Fuzzer("index", make_shards, read_all, _READERS),
)
