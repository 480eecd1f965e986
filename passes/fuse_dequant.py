"""Fold dequantize ops into what reads them: linears, embeddings, and writes to a cache of codes.

A linear whose input is dequantised from dynamic codes too quantises its rows itself. No number changes, but
for the order of sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from ir.build import trim
from ir.graph import Arg, Graph, Op, Value
from ir.rewrite import Miss, Replacement, Rule, View, rewrite
from ir.types import KV, TOKEN, Stream
from passes.base import Pass, Result, result
from passes.linears import CODED, LINEARS, bias_of, experts_of, residual_of
from passes.match import attribute, dtype
from passes.rows_of import NUM_PARTS, dequantize_of, part_of


@dataclass(frozen=True)
class FuseDequant(Pass):
    def run(self, graph: Graph) -> Result:
        return result(rewrite(graph, RULES))


def _linear(op: Op, view: View) -> Replacement | Miss | None:
    codes = dequantize_of(view.producer, op.args[1])
    if codes is None:
        return _why_not(op, view)
    x, x_attrs = _input(op, view)
    parts = [part_of(view, op.args[1], i) for i in range(NUM_PARTS)]
    experts = experts_of(op)
    if experts is not None:
        parts.insert(2, experts)
    args = trim([x, *parts, bias_of(op), residual_of(op)])
    attrs = {**op.attrs, **x_attrs, **_grid(codes), "dtype": str(dtype(op.out))}
    return view.op(CODED[op.kind], *args, **attrs)


def _why_not(op: Op, view: View) -> Miss | None:
    made = view.made_by(op.args[1], "concat", "slice", "split")
    if made is None or not any(view.made_by(a, "dequantize") for a in made.args):
        return None
    return Miss("fuse dequantize", op, "its rows are quantised in several formats, or by its columns")


def _input(op: Op, view: View) -> tuple[Arg, dict[str, Any]]:
    """What the linear reads, and how it quantises that."""
    x = op.args[0]
    back = view.made_by(x, "dequantize")
    made = view.made_by(back.args[0], "quantize") if back is not None else None
    if back is None or made is None or len(back.args) > 2 or back.args != made.outs:
        return x, {}
    size = attribute(made, "group_size")
    if attribute(made, "scale") != "f32" or attribute(back, "group_size") != size or attribute(back, "zero"):
        return x, {}
    return made.args[0], {"x_dtype": attribute(made, "dtype"), "x_group_size": size}


def _grid(codes: Op) -> dict[str, Any]:
    return {name: attribute(codes, name) for name in ("group_size", "zero")}


def _embed(op: Op, view: View) -> Replacement | None:
    codes = dequantize_of(view.producer, op.args[1])
    if codes is None:
        return None
    parts = [part_of(view, op.args[1], i) for i in range(NUM_PARTS)]
    return view.op("qembed", op.args[0], *trim(parts), **{**_grid(codes), "dtype": str(dtype(op.out))})


def _kv_write(op: Op, view: View) -> Replacement | None:
    """The cache's kernel quantises what it writes: doing so twice gives the same codes."""
    state, *streams = op.args[:-1]
    kv = cast(KV, cast(Value, state).type)
    plain = [_exact(view, arg, stream) for arg, stream in zip(streams, kv.streams, strict=True)]
    if plain == streams:
        return None
    return view.op("kv_write", state, *plain, op.args[-1], **op.attrs)


def _exact(view: View, arg: Arg, stream: Stream) -> Arg:
    """What a stream's elements were before they were quantised as the stream does it."""
    back = view.made_by(arg, "dequantize")
    made = view.made_by(back.args[0], "quantize") if back is not None else None
    if back is None or made is None or back.args != made.outs:
        return arg
    given = (attribute(made, "dtype"), attribute(made, "group_size"), attribute(made, "scale"))
    if given != (stream.dtype, 0, "f16") or stream.per != TOKEN:
        return arg
    return made.args[0]


RULES = (
    Rule("fuse dequantize", LINEARS, _linear),
    Rule("fuse dequantize", ("embed",), _embed),
    Rule("fuse quantize", ("kv_write",), _kv_write),
)
