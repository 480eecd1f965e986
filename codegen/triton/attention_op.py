"""What an attention says: its cache, mask and sizes, the tiles that fit them, and the parts of its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from codegen.triton.attention_tiles import AttentionTile, attention_tiles
from codegen.triton.context import Context, shape_of
from codegen.triton.masks import Mask
from codegen.triton.schedule import power_of_two
from ir.dims import Dim
from ir.graph import Op, Value, Weight
from ir.ops.attention import FIRST_TABLE, TAIL
from ir.types import KV, DType
from passes.memory.sizes import SPLITS, decode_rows

LEAST_PART = 256  # keys of a part that are worth a program
UNBOUNDED_CONTEXT = 1 << 20  # tokens, where the graph does not bound them


@dataclass(frozen=True)
class AttentionOp:
    ctx: Context
    op: Op

    @cached_property
    def kv(self) -> KV:
        return cast(KV, cast(Value, self.op.args[1]).type)

    @cached_property
    def tail(self) -> Value | None:
        found = self.op.args[TAIL] if self.kv.needs_tail else None
        return cast("Value | None", found)

    @cached_property
    def factor(self) -> DType:
        """Of products' factors: the cache's element type or, where it is quantised, its tail's or bf16."""
        kv = self.kv if self.tail is None else cast(KV, self.tail.type)
        wide = [s.dtype for s in kv.streams[:2] if s.dtype is DType.F32]
        plain = [s.dtype for s in kv.streams[:2] if not s.is_quantized]
        return [*wide, *plain, DType.BF16][0]

    @cached_property
    def kv_heads(self) -> int:
        return self.kv.streams[0].heads

    @cached_property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return cast(int, shape_of(self.op.out)[1]) // self.kv_heads

    def optional(self, index: int) -> Value | Weight | None:
        found = self.op.args[index] if index < len(self.op.args) else None
        return cast("Value | Weight | None", found)

    @cached_property
    def distances(self) -> int:
        """Of the numbers that are added by distance; 0 where there are none, or slopes."""
        bias = self.optional(6)
        shape = () if bias is None else shape_of(bias)
        return cast(int, shape[1]) if len(shape) == 2 else 0

    @cached_property
    def tables(self) -> list[Value | Weight]:
        return [cast("Value | Weight", a) for a in self.op.args[FIRST_TABLE:]]

    @cached_property
    def mask(self) -> Mask:
        return Mask.of(self.op.attr("mask"), tuple(cast(int, shape_of(t)[1]) for t in self.tables))

    @cached_property
    def context_tokens(self) -> int:
        """The longest request there may be."""
        blocks: Dim = shape_of(cast(Value, self.op.args[2]))[1]
        most = blocks if isinstance(blocks, int) else self.ctx.graph.dims[str(blocks)][1]
        return UNBOUNDED_CONTEXT if most is None else most * self.kv.block

    # --- tiles

    @cached_property
    def scratch_rows(self) -> int:
        return decode_rows(self.group)

    @cached_property
    def decode_tokens(self) -> int:
        """Of a request that is the decode kernel's, at most."""
        return self.scratch_rows // self.group

    @cached_property
    def tiles(self) -> tuple[AttentionTile, AttentionTile]:
        """Prefill's and decode's."""
        streams = self.kv.streams[:2]
        width = power_of_two(max(s.head_size for s in streams))
        prefill, decode, invariant = attention_tiles(self.ctx.device, width, self.factor.size_bytes)
        if self.ctx.invariant:
            return invariant, invariant
        if self.distances and prefill.rows > 64:
            prefill = replace(prefill, rows=64)  # which leaves registers for a number at each distance
        if self.scratch_rows <= decode.rows:
            return prefill, replace(decode, rows=self.scratch_rows)
        return prefill, decode if prefill.rows <= decode.rows else prefill

    def parts(self, tile: AttentionTile) -> int:
        """Tiles that it takes for one token's query heads."""
        return -(-self.group // tile.rows)

    # --- parts of the keys

    @cached_property
    def least_tiles(self) -> int:
        return max(1, LEAST_PART // self.tiles[1].keys)

    @cached_property
    def split_tiles(self) -> int | None:
        """Tiles of keys in a part, where all parts are equal."""
        tiles = -(-self.context_tokens // self.tiles[1].keys)
        return max(self.least_tiles, -(-tiles // SPLITS)) if self.ctx.invariant else None

    @cached_property
    def splits(self) -> int:
        """The most parts that a request's keys may have."""
        tiles = -(-self.context_tokens // self.tiles[1].keys)
        if self.split_tiles is not None:
            return -(-tiles // self.split_tiles)
        seen = [n for n in (self.mask.keys.window, self.mask.keys.chunk) if n is not None]
        seen_tiles = (
            -(-(min(seen, default=self.context_tokens) + self.decode_tokens) // self.tiles[1].keys) + 1
        )
        return min(SPLITS, -(-min(tiles, seen_tiles) // self.least_tiles))
