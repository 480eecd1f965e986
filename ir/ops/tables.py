"""Checks of what ops on paged states share: the layer of a group, and the tables of a step."""

from __future__ import annotations

from ir.dims import normalize
from ir.ops.base import Call
from ir.types import KV, Tensor


def check_layer(call: Call, kv: KV) -> None:
    if call.integer("layer") >= kv.layers:
        call.fail(f"layer {call.attrs['layer']} is not one of the group's {kv.layers}")


def check_tables(call: Call, table: Tensor, lens: Tensor, starts: Tensor) -> None:
    if not all(t.dtype.is_integer for t in (table, lens, starts)):
        call.fail("table, lens and starts must be integers")
    if table.rank != 2 or lens.shape != table.shape[:1] or starts.shape != (normalize(table.shape[0] + 1),):
        shapes = f"{list(table.shape)}, {list(lens.shape)}, {list(starts.shape)}"
        call.fail(f"table, lens and starts are {shapes}, not [R,M], [R], [R+1]")
