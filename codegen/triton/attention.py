"""Paged attention: tiles of many queries, and the keys of few queries in parts (flash decoding).

A program attends from a tile of rows, which are tokens times the query heads that share a key/value head, so
that keys and values are read once for all of them. It visits the tiles of keys that some row may see, in
order, with an online softmax (arXiv 2205.14135), and looks at the mask only in tiles that some row sees in
part. Factors of products have the cache's element type, and so have the softmax's weights when they multiply
values; sums and all else are f32.

Requests whose rows are few enough for one tile, those that decode or check a few drafted tokens, are the
decode kernel's: their keys are split into at most SPLITS parts, worked on side by side, whose results a third
kernel takes together in order. The parts are the request's own, whatever else is in the step: as large as its
keys need or, where results must be invariant, the same for all lengths. Then prefill goes through the same
parts with the same tiles and arithmetic, and a token's bits do not depend on which kernel it meets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from codegen.triton import quantize
from codegen.triton.attention_op import AttentionOp
from codegen.triton.attention_streams import StreamHooks
from codegen.triton.attention_tiles import COMBINED_ROWS, AttentionTile
from codegen.triton.context import FLOATS, TYPES, Context, dtype_of, literal, refuse, shape_of
from codegen.triton.kv_layout import StreamLayout
from codegen.triton.launch import Arg, Case, Expr, Launch, cdiv, expression
from codegen.triton.render import render
from ir.graph import Op, Value
from ir.ops.attention import TAIL
from ir.types import KV, DType
from passes.match import attribute

LOG2E = 1.4426950408889634
_ROWS = {"slopes": ("slope",), "distances": ("distances", "of_head")}  # what attending takes for an operand


@dataclass(frozen=True)
class Attention(AttentionOp):
    """Its hooks and launches."""

    # --- what templates are filled in with

    @cached_property
    def apart(self) -> bool:
        """Whether parts are worked on by programs of their own, and then taken together."""
        merged = self.split_tiles is not None and (self.tail is not None or self.optional(5) is not None)
        return self.splits > 1 or merged

    @property
    def partials(self) -> int:
        """The most parts: the tail is one more."""
        return self.splits + (self.tail is not None)

    def stream(self, kv: KV, index: int, keys: int) -> StreamHooks:
        dtype, type_ = kv.streams[index].dtype, TYPES[self.factor]
        converted = f"CODE.to({type_})"
        if self.ctx.device.interpreted:
            type_, converted = "tl.float32", quantize.decode(self.ctx.device, dtype)
        elif dtype is DType.F8E4M3:
            converted = f"{quantize.decode(self.ctx.device, dtype)}.to({type_})"
        elif not any(s.is_quantized for s in self.kv.streams[:2]):
            type_, converted = TYPES[dtype], "CODE"
        return StreamHooks(kv, self.op.attr("layer"), index, type_, converted, keys)

    def streams(self, kv: KV, keys: int) -> dict[str, StreamHooks]:
        return {"key": self.stream(kv, 0, keys), "value": self.stream(kv, 1, keys)}

    @cached_property
    def hooks(self) -> dict[str, Any]:
        scale, softcap = float(self.op.attr("scale")), float(attribute(self.op, "softcap"))
        biased = self.optional(6) is not None
        plain = not softcap and not biased and scale > 0
        return {
            "mask": self.mask,
            "block": self.kv.block,
            "tail": self.tail is not None,
            "seen": self.seen,
            "precision": self.ctx.device.dot_f32,
            "softcap": literal(softcap) if softcap else "",
            "scale": literal(scale / softcap if softcap else scale),
            "scaled": not plain and not softcap and not biased,
            "unit": literal(scale * LOG2E if plain else LOG2E),
            "slopes": biased and not self.distances,
            "distances": self.distances,
            "sinks": self.optional(5) is not None,
            "log2e": literal(LOG2E),
        }

    @property
    def own(self) -> str:
        """The first key of a query's block."""
        return f"(position // {self.kv.block} * {self.kv.block})[:, None]"

    @property
    def seen(self) -> str:
        """Which keys a row sees of those from `low` to `high` that its mask's other terms leave it."""
        if self.tail is not None:
            return f"at[None, :] < {self.own}"
        return (
            "at[None, :] <= position[:, None]"
            if self.mask.causal
            else ("(at[None, :] < high) & (position >= 0)[:, None]")
        )

    @cached_property
    def extra(self) -> dict[str, Arg]:
        """Operands that only some have, but for sinks."""
        bias, name = self.optional(6), "distances" if self.distances else "slopes"
        found = {} if bias is None else {name: self.ctx.pointer(bias)}
        return found | {f"table{i}": self.ctx.pointer(t) for i, t in enumerate(self.tables)}

    @property
    def attended(self) -> list[str]:
        """What the function that attends takes for them."""
        return [taken for name in self.extra for taken in _ROWS.get(name, (name,))]

    def kernel_hooks(self, tile: AttentionTile) -> dict[str, Any]:
        parts = self.parts(tile)
        heads = -(-self.group // parts)
        streams = self.streams(self.kv, tile.keys)
        arrays = [f"{x}_{a}s" for x, s in (("k", streams["key"]), ("v", streams["value"])) for a in s.arrays]
        return (
            self.hooks
            | streams
            | {
                "attend_name": self.attend(tile),
                "own_name": self.attend_own(tile),
                "merge_name": self.merge(),
                "pointers": ", ".join(["k_head", "v_head", *arrays]),
                "extra": "".join(f", {name}" for name in self.attended),
                "parts": parts,
                "heads": heads,
                "tokens": tile.rows // heads,
                "group": self.group,
                "kv_heads": self.kv_heads,
                "decode_tokens": self.decode_tokens,
                "scratch_rows": self.scratch_rows,
                "splits": self.splits,
                "apart": self.apart,
                "partials": self.partials,
                "split_tiles": self.split_tiles,
                "least_tiles": self.least_tiles,
                "q_ld": self.ctx.ld(cast(Value, self.op.args[0])),
                "out_ld": self.ctx.ld(self.op.out),
            }
        )

    def attend(self, tile: AttentionTile) -> str:
        """The function that folds tiles of keys into a softmax."""
        return self._attend(self.streams(self.kv, tile.keys), self.seen)

    def attend_own(self, tile: AttentionTile) -> str:
        """That which folds those of the rows' own blocks, from the tail; "" where there is none."""
        if self.tail is None:
            return ""
        streams = self.streams(cast(KV, self.tail.type), tile.keys)
        return self._attend(streams, f"(at[None, :] <= position[:, None]) & (at[None, :] >= {self.own})")

    def _attend(self, streams: dict[str, StreamHooks], seen: str) -> str:
        arrays = [f"{x}_{a}s" for x, s in (("k", streams["key"]), ("v", streams["value"])) for a in s.arrays]
        names = [
            "q",
            "k_head",
            "v_head",
            *arrays,
            *"blocks acc total top first last low high position".split(),
        ]
        names += self.attended
        body = render("attend", **self.hooks | streams | {"seen": seen})
        return self.ctx.module.function("attend", names, ["MASKED", "BLOCK_N"], body)

    def merge(self) -> str:
        """The function that makes one softmax of two; "" where none is needed."""
        if not self.apart and self.split_tiles is None:
            return ""
        names = "acc total top acc_of total_of top_of".split()
        return self.ctx.module.function("merge", names, [], render("attention_merge"))

    # --- launches

    def args(self) -> dict[str, Arg]:
        op, state = self.op, cast(Value, self.op.args[1])
        table, lens, starts = (cast(Value, a) for a in op.args[2:5])
        k, v = (StreamLayout(self.kv, op.attr("layer"), index) for index in (0, 1))
        found = {
            "q": self.ctx.pointer(cast(Value, op.args[0])),
            "k_pool": k.codes(self.ctx, state),
            "v_pool": v.codes(self.ctx, state),
            **{f"k_{name}_pool": arg for name, arg in k.scales(self.ctx, state).items()},
            **{f"v_{name}_pool": arg for name, arg in v.scales(self.ctx, state).items()},
            "table": self.ctx.pointer(table),
            "lens": self.ctx.pointer(lens),
            "starts": self.ctx.pointer(starts),
            "out": self.ctx.pointer(op.out),
            **self.extra,
            **self.tail_args,
        }
        return found | self.sinks

    @property
    def tail_args(self) -> dict[str, Arg]:
        if self.tail is None:
            return {}
        table, kv = cast(Value, self.op.args[TAIL + 1]), cast(KV, self.tail.type)
        k, v = (StreamLayout(kv, self.op.attr("layer"), index).codes(self.ctx, self.tail) for index in (0, 1))
        return {"k_tail_pool": k, "v_tail_pool": v, "tail_table": self.ctx.pointer(table)}

    @property
    def sinks(self) -> dict[str, Arg]:
        sinks = self.optional(5)
        return {} if sinks is None else {"sinks": self.ctx.pointer(sinks)}

    @cached_property
    def requests(self) -> Expr:
        return expression(shape_of(cast(Value, self.op.args[3]))[0])

    @cached_property
    def num_tokens(self) -> Expr:
        return expression(shape_of(self.op.out)[0])

    @property
    def sizes(self) -> dict[str, Arg]:
        width = shape_of(cast(Value, self.op.args[2]))[1]
        found = {"requests": self.ctx.size(self.requests), "table_width": self.ctx.size(width)}
        if self.tail is None:
            return found
        return found | {"tail_width": self.ctx.size(shape_of(cast(Value, self.op.args[TAIL + 1]))[1])}

    def prefill_launch(self) -> Launch:
        tile = self.tiles[0]
        hooks = self.kernel_hooks(tile)
        tiles: Expr = ("+", ("//", self.num_tokens, hooks["tokens"]), self.requests)
        return self.ctx.launch(
            "attention_prefill",
            render("attention_prefill", **hooks),
            self.args() | self.sizes,
            (tiles, self.kv_heads * hooks["parts"]),
            {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def decode_launches(self) -> tuple[Launch, ...]:
        tile = self.tiles[1]
        hooks = self.kernel_hooks(tile)
        partial = {"partial": self.ctx.scratch(self.op)}
        decode = self.ctx.launch(
            "attention_decode",
            render("attention_decode", **hooks),
            self.args() | (partial if self.apart else {}) | self.sizes,
            (self.requests, self.kv_heads * hooks["parts"], self.partials if self.apart else 1),
            {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys},
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if not self.apart:
            return (decode,)
        args = {name: arg for name, arg in self.args().items() if name in ("lens", "starts", "out", "sinks")}
        combine = self.ctx.launch(
            "attention_combine",
            render("attention_combine", **hooks),
            partial | args | {"requests": self.ctx.size(self.requests)},
            (self.requests, self.kv_heads, cdiv(self.scratch_rows, COMBINED_ROWS)),
            {"BLOCK_M": COMBINED_ROWS, "BLOCK_N": tile.keys},
        )
        return (decode, combine)


def paged_attention(ctx: Context, op: Op) -> list[Case]:
    """Prefill, decode and combine; only the latter two where there are as many tokens as requests.

    Every request has one token then. A step that is filled up with empty requests must therefore have more
    tokens than requests, unless no request has more than one.
    """
    attention = Attention(ctx, op)
    for stream in attention.kv.streams[:2]:
        if stream.dtype not in FLOATS and not stream.is_quantized:
            raise refuse(op, f"a cache of type {stream.dtype}")
    if attention.tail is not None and not attention.mask.causal:
        raise refuse(op, "a mask that shows later keys, where a query reads its own block from a tail")
    if dtype_of(op.out) not in FLOATS:
        raise refuse(op, f"a result of type {dtype_of(op.out)}; there is {', '.join(FLOATS)}")
    prefill, decode = attention.prefill_launch(), attention.decode_launches()
    one_token_each: Expr = ("-", attention.num_tokens, attention.requests)
    return [Case(decode, (one_token_each, 0)), Case((prefill, *decode))]
