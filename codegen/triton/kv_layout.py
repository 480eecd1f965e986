"""How a KV group's block lies on GPUs, and how kernels reach into it.

Layer after layer, in a layer stream after stream, of each its elements or codes, then scales, then minima.
Elements and codes of a byte are [heads, block, head_size], of a stream that is kept once for a block
[heads, head_size]. Smaller codes share bytes, neighbours from the low bits up: where tokens have scales of
their own those are a token's, [heads, block, bytes]; where a block's channels have, so that a block is
written whole, those are a channel's, [heads, bytes, channels], and a tile of keys is unpacked already
transposed. Rows are filled up to head sizes that are multiples of 16. Scales and minima, of f16, are
[heads, block] or [heads, channels]. In a state group every stream begins on a multiple of 64 bytes. A block's
bytes are as on CPUs (codegen.kv_block).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from codegen.kv_block import SCALE_BYTES, block_bytes, stream_offsets
from codegen.triton.context import POINTERS, Context
from codegen.triton.launch import Arg
from codegen.triton.weights import per_byte, stored_dtype
from ir.graph import Value
from ir.types import CHANNEL, KV, Stream

ROW = 16  # head sizes of packed codes are filled up to a multiple of


@dataclass(frozen=True)
class StreamLayout:
    """A stream of a layer's blocks. row, head, stride: from one row, head and block to the next, in elements
    of the array of codes; scale_head and scale_stride: the same of scales and minima.
    """

    kv: KV
    layer: int
    index: int

    @cached_property
    def stream(self) -> Stream:
        return self.kv.streams[self.index]

    @property
    def size(self) -> int:
        return self.stream.head_size

    @property
    def heads(self) -> int:
        return self.stream.heads

    @property
    def channels(self) -> bool:
        """Whether scales are a block's channels'."""
        return self.stream.per == CHANNEL

    @cached_property
    def per(self) -> int:
        """Codes in a byte."""
        return per_byte(self.stream.dtype)

    @cached_property
    def _element_bytes(self) -> int:
        return stored_dtype(self.stream.dtype).size_bytes

    @cached_property
    def row(self) -> int:
        filled = self.size if self.per == 1 else -(-self.size // ROW) * ROW
        return filled if self.channels else filled // self.per

    @cached_property
    def head(self) -> int:
        rows = 1 if self.stream.per_block else self.kv.block
        return self.row * rows // (self.per if self.channels else 1)

    @cached_property
    def stride(self) -> int:
        return block_bytes(self.kv) // self._element_bytes

    @property
    def bytes(self) -> int:
        """Of a row, without what fills it up; elements where they have bytes of their own."""
        return self.size if self.channels else -(-self.size // self.per)

    @property
    def scale_head(self) -> int:
        return self.size if self.channels else self.kv.block

    @property
    def scale_stride(self) -> int:
        return block_bytes(self.kv) // SCALE_BYTES

    @cached_property
    def _start(self) -> int:
        offsets, layer_bytes = stream_offsets(self.kv)
        start = self.layer * layer_bytes + offsets[self.index]
        if start % self._element_bytes:
            raise ValueError(
                f"stream {self.stream.name} of {self.stream.dtype} starts at byte {start} of a block"
            )
        return start

    def codes(self, ctx: Context, state: Value) -> Arg:
        return ctx.cache(state, self._start, POINTERS[self.stream.dtype])

    def scales(self, ctx: Context, state: Value) -> dict[str, Arg]:
        """Pointers by name, "scale" and "min", of those that there are."""
        at = self._start + self.heads * self.head * self._element_bytes
        names = [part.rpartition(".")[2] for part in self.stream.parts[1:]]
        array = self.heads * self.scale_head * SCALE_BYTES
        return {name: ctx.cache(state, at + i * array, "*fp16") for i, name in enumerate(names)}
