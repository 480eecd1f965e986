"""How a block of a KV group lies in memory: layer after layer, and in a layer stream after stream.

docs/artifact.md describes it; the runtime only needs a block's bytes.
"""

from __future__ import annotations

from ir.types import KV

ALIGNMENT_BYTES = 64
BLOCKS = (8, 16, 32, 64)  # tokens of a block: the sizes that have kernels


def block_bytes(kv: KV) -> int:
    """Bytes of a block over all layers, aligned."""
    return -(-kv.bytes_per_block // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stream_offsets(kv: KV) -> tuple[list[int], int]:
    """(byte offset of each stream in a layer, bytes of a layer) of one block."""
    offsets: list[int] = []
    end = 0
    for stream in kv.streams:
        offsets.append(end)
        end += stream.bytes_per_block(kv.block)
    return offsets, end


def keys_in_lanes(kv: KV, index: int) -> bool:
    """Whether a stream lies with a block's tokens innermost: the first one named k does."""
    return next((i for i, s in enumerate(kv.streams) if s.name == "k"), -1) == index
