"""How a block of a KV group lies in memory: layer after layer, in a layer stream after stream.

A stream's codes come first, then its scales, then its minima. In a state group every stream begins on a
multiple of 64 bytes. docs/artifact.md describes it; the runtime only needs a block's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.types import CHANNEL, KV, Stream

ALIGNMENT_BYTES = 64
BLOCKS = (8, 16, 32, 64)  # tokens of a block: the sizes that have kernels
STRIP = 16  # codes that are packed together
SCALE_BYTES = 2


@dataclass(frozen=True)
class Place:
    """Where a stream lies: bytes from a block's start. Of an array that it lacks, where it ends."""

    codes: int
    scales: int
    minima: int


def block_bytes(kv: KV) -> int:
    """Bytes of a block over all layers, aligned."""
    return _aligned(kv.layers * stream_offsets(kv)[1])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stream_offsets(kv: KV) -> tuple[list[int], int]:
    """(byte offset of each stream in a layer, bytes of a layer) of one block."""
    offsets: list[int] = []
    end = 0
    for stream in kv.streams:
        offsets.append(end)
        end += stream.bytes_per_block(kv.block)
        end = _aligned(end) if kv.state else end
    return offsets, end


def stream_places(kv: KV, layer: int) -> list[Place]:
    """Of each stream of a layer."""
    offsets, layer_bytes = stream_offsets(kv)
    found: list[Place] = []
    for index, stream in enumerate(kv.streams):
        codes = layer * layer_bytes + offsets[index]
        scales = codes + code_bytes(stream, kv.block, keys_in_lanes(kv, index))
        per_array = SCALE_BYTES * stream.heads * (stream.head_size if stream.per == CHANNEL else kv.block)
        found.append(Place(codes, scales, scales + per_array if stream.is_quantized else scales))
    return found


def code_bytes(stream: Stream, block: int, keys: bool) -> int:
    """Bytes of a stream's elements in a layer of a block; packed ones are filled up to whole strips."""
    size = stream.head_size
    if stream.dtype.bits < 8 and not keys:
        size = -(-size // STRIP) * STRIP
    tokens = 1 if stream.per_block else block
    return stream.heads * size * tokens * stream.dtype.bits // 8


def keys_in_lanes(kv: KV, index: int) -> bool:
    """Whether a stream lies with a block's tokens innermost: the first one named k does."""
    return next((i for i, s in enumerate(kv.streams) if s.name == "k"), -1) == index
