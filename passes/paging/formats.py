"""Formats of a quantised KV cache: the codes of its streams, and what shares a scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.graph import Weight
from ir.types import CHANNEL, KV, TOKEN, DType, Stream

STRIP = 16  # codes of fewer than 8 bits are packed in strips of so many tokens


@dataclass(frozen=True)
class Format:
    """The same codes for all streams. per: what shares a scale of the keys; of others each token does."""

    dtype: DType
    per: str = TOKEN

    @property
    def block_strip(self) -> int:
        """What a block's tokens must be a multiple of."""
        return STRIP if self.dtype.bits < 8 else 1

    def quantized(self, kv: KV) -> KV:
        streams = [
            Stream(s.name, self.dtype, s.heads, s.head_size, self.per if s.name == "k" else TOKEN)
            for s in kv.streams
        ]
        return replace(kv, streams=tuple(streams))


FORMATS = {
    "int8": Format(DType.I8),
    "fp8": Format(DType.F8E4M3),
    "int4": Format(DType.U4, CHANNEL),
    "int2": Format(DType.U2, CHANNEL),
    "int4-token": Format(DType.U4),  # to compare with
    "int2-token": Format(DType.U2),
}


def default_block(format: str) -> int:
    """Tokens of a block where none are asked for: more where they share scales."""
    return 64 if format in FORMATS and FORMATS[format].per == CHANNEL else 16


def tail_of(kv: KV, dtype: DType) -> KV:
    """What holds the last block of each request for a group that quantises it when it is full."""
    streams = tuple(Stream(s.name, dtype, s.heads, s.head_size) for s in kv.streams)
    return KV(streams, kv.layers, kv.block, tail=True)


@dataclass(frozen=True)
class KeyGrid:
    """What calibration found of a layer's keys, f32 [G,D] each: (k - shift) * inverse is quantised, and
    queries are multiplied by scale, which is 1 / inverse. shift: None where there is none."""

    inverse: Weight
    scale: Weight
    shift: Weight | None = None
