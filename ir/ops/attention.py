"""Attention and the KV cache. Letters as in docs/ir.md: T tokens, R requests, H heads, G key/value heads, D head size."""

from __future__ import annotations

from typing import Any

import numpy as np

from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, broadcast
from ir.predicates import evaluate_grid
from ir.types import DType, Tensor, Type


def _check_heads(call: Call, heads: Any, kv_heads: Any) -> None:
    if heads % kv_heads:
        call.fail(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")


def _check_per_head(call: Call, index: int, heads: Any) -> None:
    per_head = call.optional(index)
    if per_head is not None and per_head.shape != (heads,):
        call.fail(f"operand {index} has shape {list(per_head.shape)}, not one element per head [{heads}]")


def _check_mask(call: Call, mask: Tensor, shape: tuple[Any, ...]) -> None:
    if call.attrs["mask"] is not None:
        call.fail("has both a mask operand and a mask predicate")
    if not (mask.dtype is DType.BOOL or mask.dtype.is_float) or broadcast(call, [mask.shape, shape]) != shape:
        call.fail(f"mask {mask.dtype}{list(mask.shape)} does not broadcast to {list(shape)}")


def _attention(call: Call) -> tuple[Type, ...]:
    q, k, v, mask = call.tensor(0), call.tensor(1), call.tensor(2), call.optional(3)
    if not (q.rank == k.rank == v.rank == 4):
        call.fail("q, k and v must be [1,heads,S,head_size]")
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or k.shape[2] != q.shape[2]:
        call.fail(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit")
    _check_heads(call, q.shape[1], k.shape[1])
    if mask is not None:
        _check_mask(call, mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    _check_per_head(call, 4, q.shape[1])
    _check_per_head(call, 5, q.shape[1])
    return (Tensor(q.dtype, (q.shape[0], q.shape[2], q.shape[1], v.shape[3])),)


def _kv_write(call: Call) -> tuple[Type, ...]:
    kv, layer = call.kv(0), call.attrs["layer"]
    if not 0 <= layer < kv.layers:
        call.fail(f"layer {layer} is not one of the group's {kv.layers}")
    if len(call.types) != len(kv.streams) + 2:
        call.fail(f"takes the state, {len(kv.streams)} streams and the slots; got {len(call.types)} operands")
    slots = call.tensor(len(call.types) - 1)
    for index, stream in enumerate(kv.streams, 1):
        if call.tensor(index).shape != (*slots.shape, stream.heads, stream.head_size):
            call.fail(f"stream {stream.name} is {list(call.tensor(index).shape)}")
    return (kv,)


def _paged_attention(call: Call) -> tuple[Type, ...]:
    q, kv, table, lens, starts = call.tensor(0), call.kv(1), call.tensor(2), call.tensor(3), call.tensor(4)
    key, value = kv.streams[0], kv.streams[1]
    if q.rank != 3 or q.shape[2] != key.head_size:
        call.fail(f"q {list(q.shape)} is not [T,H,{key.head_size}]")
    if not 0 <= call.attrs["layer"] < kv.layers:
        call.fail(f"layer {call.attrs['layer']} is not one of the group's {kv.layers}")
    if table.rank != 2 or lens.rank != 1 or starts.rank != 1:
        call.fail("table is [R,M], lens [R], starts [R+1]")
    _check_heads(call, q.shape[1], key.heads)
    _check_per_head(call, 5, q.shape[1])
    _check_per_head(call, 6, q.shape[1])
    return (Tensor(q.dtype, (q.shape[0], q.shape[1], value.head_size)),)


def attend(
    q: Array,  # [H, S, D]
    k: Array,  # [G, N, D]
    v: Array,  # [G, N, E]
    keep: Any,  # [S, N] or [H, S, N] boolean
    bias: Any,  # added to the scores, broadcasts to [H, S, N]
    sinks: Array | None,  # [H]
    scale: float,
    softcap: float,
) -> Array:  # [S, H, E]
    """Softmax attention, written out: every score, then the mask, then the softmax."""
    repeat = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, repeat, 0).astype(q.dtype), np.repeat(v, repeat, 0).astype(q.dtype)
    scores = np.matmul(q, k.transpose(0, 2, 1)) * q.dtype.type(scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(keep, scores + bias, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.asarray(np.matmul(e / total, v), dtype=q.dtype).transpose(1, 0, 2)


def _mask_of(call: RefCall, q: Any, k: Any, slopes: Array | None, tables: Any) -> tuple[Any, Any]:
    """(keep, bias) for query positions q and key positions k."""
    q, k = np.asarray(q)[:, None], np.asarray(k)[None, :]
    keep = evaluate_grid(call.attrs["mask"], q, k, tables)
    bias = 0.0 if slopes is None else slopes[:, None, None] * (k - q)
    return keep, bias


def _attention_reference(call: RefCall) -> tuple[Array]:
    q, k, v, mask, sinks, slopes = (call.arg(i) for i in range(6))
    positions = np.arange(q.shape[2])
    if mask is not None:
        keep, bias = (mask[0], 0.0) if mask.dtype == np.bool_ else (True, mask[0])
    elif call.attrs["mask"] is not None:
        keep, bias = _mask_of(call, positions, positions, slopes, call.args[6:])
    else:
        keep, bias = True, 0.0
    out = attend(q[0], k[0], v[0], keep, bias, sinks, call.attrs["scale"], call.attrs["softcap"])
    return (out[None],)


def _kv_write_reference(call: RefCall) -> tuple[dict[str, Array]]:
    state, fresh, slots = call.args[0], call.args[1:-1], call.args[-1]
    written = {name: array.copy() for name, array in state.items()}
    for array, x in zip(written.values(), fresh, strict=True):
        flat = array[call.attrs["layer"]].reshape(-1, *array.shape[3:])
        flat[slots] = x
    return (written,)


def _paged_attention_reference(call: RefCall) -> tuple[Array]:
    q, state, table, lens, starts, sinks, slopes = (call.arg(i) for i in range(7))
    k_all, v_all = (array[call.attrs["layer"]] for array in list(state.values())[:2])  # [blocks, block, G, D]
    out = np.empty((q.shape[0], q.shape[1], v_all.shape[-1]), q.dtype)
    for r, total in enumerate(lens):
        first, last = starts[r], starts[r + 1]
        blocks = table[r, : -(-total // k_all.shape[1])]
        k, v = (a[blocks].reshape(-1, *a.shape[2:])[:total].transpose(1, 0, 2) for a in (k_all, v_all))
        positions = np.arange(total - (last - first), total)
        keep, bias = _mask_of(call, positions, np.arange(total), slopes, call.args[7:])
        rows = q[first:last].transpose(1, 0, 2)
        out[first:last] = attend(rows, k, v, keep, bias, sinks, call.attrs["scale"], call.attrs["softcap"])
    return (out,)


OPS: tuple[OpDef, ...] = (
    OpDef(
        "attention", ("q", "k", "v", "mask?", "sinks?", "slopes?", "tables*"), _attention, _attention_reference,
        {"scale": REQUIRED, "mask": None, "softcap": 0.0}, sequence_aware=True,
    ),
    OpDef("kv_write", ("kv", "x*"), _kv_write, _kv_write_reference, {"layer": REQUIRED},
          sequence_aware=True, rollback="truncate"),
    OpDef(
        "paged_attention", ("q", "kv", "table", "lens", "starts", "sinks?", "slopes?", "tables*"),
        _paged_attention, _paged_attention_reference,
        {"layer": REQUIRED, "scale": REQUIRED, "mask": REQUIRED, "softcap": 0.0}, sequence_aware=True,
    ),
)  # fmt: skip
