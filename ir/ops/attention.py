"""Attention and the KV cache.

Letters as in docs/ir.md: T tokens, R requests, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ir.dims import Dim
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, broadcast
from ir.ops.kv_codes import decode, encode
from ir.ops.tables import check_layer, check_tables
from ir.predicates import evaluate_grid, why_not
from ir.types import KV, DType, Stream, Tensor, Type

TAIL, FIRST_TABLE = 7, 9  # operands of paged_attention: the tail, then its table; the first mask table


def _check_heads(call: Call, heads: Dim, kv_heads: Dim) -> None:
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not kv_heads or heads % kv_heads:
        call.fail(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")


def _check_per_head(call: Call, index: int, heads: Dim) -> None:
    per_head = call.optional(index)
    if per_head is not None and not (per_head.shape == (heads,) and per_head.dtype.is_float):
        call.fail(f"operand {index} is {list(per_head.shape)}, not one float per head [{heads}]")


def _check_bias(call: Call, index: int, heads: Dim) -> None:
    """Slopes [H], or numbers [H,N] by distance."""
    bias = call.optional(index)
    if bias is None or bias.rank != 2:
        return _check_per_head(call, index, heads)
    size = bias.shape[1]
    if bias.shape[0] != heads or not isinstance(size, int) or size < 1 or not bias.dtype.is_float:
        call.fail(f"operand {index} is {list(bias.shape)}, not floats [{heads},N] by distance")


def _check_mask(call: Call, mask: Tensor, shape: tuple[Dim, ...]) -> None:
    if call.attrs["mask"] is not None:
        call.fail("has both a mask operand and a mask predicate")
    if not (mask.dtype is DType.BOOL or mask.dtype.is_float) or broadcast(call, [mask.shape, shape]) != shape:
        call.fail(f"mask {mask.dtype}{list(mask.shape)} does not broadcast to {list(shape)}")


def _check_predicate(call: Call, first_table: int) -> None:
    """The predicate is over q, k and the tables given, which are boolean matrices."""
    for index in range(first_table, len(call.types)):
        table = call.tensor(index)
        if table.rank != 2 or table.dtype is not DType.BOOL:
            call.fail(f"operand {index}, a mask table, must be a boolean matrix")
    mask = call.attrs["mask"]
    reason = None if mask is None else why_not(mask, max(0, len(call.types) - first_table))
    if reason is not None:
        call.fail(f"attribute mask: {reason}")


def _check_scores(call: Call) -> None:
    call.number("scale")
    if call.number("softcap") < 0:
        call.fail(f"attribute softcap must not be negative, but is {call.attrs['softcap']}")


def _attention(call: Call) -> tuple[Type, ...]:
    q, k, v, mask = call.tensor(0), call.tensor(1), call.tensor(2), call.optional(3)
    if not (q.rank == k.rank == v.rank == 4) or q.shape[0] != 1 or k.shape[0] != 1:
        call.fail("q, k and v must be [1,heads,S,head_size]")
    if not (q.dtype == k.dtype == v.dtype) or not q.dtype.is_float:
        call.fail(f"q, k and v must have one float type, not {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[3] or k.shape[2] != q.shape[2]:
        call.fail(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit")
    _check_heads(call, q.shape[1], k.shape[1])
    if mask is not None:
        _check_mask(call, mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    _check_per_head(call, 4, q.shape[1])
    _check_bias(call, 5, q.shape[1])
    _check_predicate(call, 6)
    _check_scores(call)
    return (Tensor(q.dtype, (q.shape[0], q.shape[2], q.shape[1], v.shape[3])),)


def _kv_write(call: Call) -> tuple[Type, ...]:
    kv = call.kv(0)
    check_layer(call, kv)
    if kv.needs_tail:
        call.fail("scales of this state span a block: write to its tail, then kv_seal")
    if len(call.types) != len(kv.streams) + 2:
        call.fail(f"takes the state, {len(kv.streams)} streams and the slots; got {len(call.types)} operands")
    slots = call.tensor(len(call.types) - 1)
    if slots.rank != 1 or not slots.dtype.is_integer:
        call.fail("slots must be a vector of integers")
    for index, stream in enumerate(kv.streams, 1):
        x, shape = call.tensor(index), (*slots.shape, stream.heads, stream.head_size)
        if x.shape != shape or not x.dtype.is_float:
            call.fail(f"{x.dtype}{list(x.shape)} does not fit stream {stream.name}")
    return (kv,)


def _check_tail(call: Call, kv: KV, tail: KV, table: Tensor, tail_table: Tensor) -> None:
    """The tail keeps what the state does, in blocks of as many tokens, but not quantised."""
    same = (kv.layers, kv.block, [(s.name, s.heads, s.head_size) for s in kv.streams])
    if (
        not tail.tail
        or (tail.layers, tail.block, [(s.name, s.heads, s.head_size) for s in tail.streams]) != same
    ):
        call.fail("the tail must have lifetime tail, and the state's layers, block and streams")
    if not tail_table.dtype.is_integer or tail_table.rank != 2 or tail_table.shape[0] != table.shape[0]:
        call.fail(f"the tail's table is {list(tail_table.shape)}, not [{table.shape[0]},M]")


def _kv_seal(call: Call) -> tuple[Type, ...]:
    kv, tail = call.kv(0), call.kv(1)
    check_layer(call, kv)
    check_tables(call, call.tensor(2), call.tensor(4), call.tensor(5))
    _check_tail(call, kv, tail, call.tensor(2), call.tensor(3))
    if not kv.needs_tail:
        call.fail("no scale of this state spans a block: kv_write is enough")
    return (kv,)


def _paged_attention(call: Call) -> tuple[Type, ...]:
    q, kv = call.tensor(0), call.kv(1)
    if len(kv.streams) < 2:
        call.fail("reads two streams, keys and values")
    key, value = kv.streams[0], kv.streams[1]
    if q.rank != 3 or q.shape[2] != key.head_size or not q.dtype.is_float or key.heads != value.heads:
        call.fail(f"q {q.dtype}{list(q.shape)} is not [T,H,{key.head_size}]")
    check_layer(call, kv)
    check_tables(call, call.tensor(2), call.tensor(3), call.tensor(4))
    _check_heads(call, q.shape[1], key.heads)
    _check_per_head(call, 5, q.shape[1])
    _check_bias(call, 6, q.shape[1])
    if (len(call.types) > TAIL and call.types[TAIL] is not None) != kv.needs_tail:
        call.fail("a state whose scales span a block is read with its tail, and no other")
    if kv.needs_tail:
        _check_tail(call, kv, call.kv(TAIL), call.tensor(2), call.tensor(TAIL + 1))
    _check_predicate(call, FIRST_TABLE)
    _check_scores(call)
    return (Tensor(call.float_dtype(q.dtype), (q.shape[0], q.shape[1], value.head_size)),)


def attend(
    q: Array,  # [H, S, D]
    k: Array,  # [G, N, D]
    v: Array,  # [G, N, E]
    keep: Any,  # boolean, broadcasts to [H, S, N]
    bias: Any,  # added to the scores, broadcasts to [H, S, N]
    sinks: Array | None,  # [H]
    scale: float,
    softcap: float,
) -> Array:  # [S, H, E]
    """Softmax attention, written out: every score, then the mask, then the softmax.

    What lies in a key that no query sees is selected away, so it may be NaN. A query that sees no key gives
    NaN unless there are sinks.
    """
    repeat = q.shape[0] // k.shape[0]
    keep = np.broadcast_to(keep, (q.shape[0], q.shape[1], k.shape[1]))
    unseen = ~keep.any((0, 1))[:, None]
    k, v = np.where(unseen, 0, k), np.where(unseen, 0, v)
    k, v = np.repeat(k, repeat, 0).astype(q.dtype), np.repeat(v, repeat, 0).astype(q.dtype)
    scores = np.matmul(q, k.transpose(0, 2, 1)) * q.dtype.type(scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(keep, scores + bias, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return np.asarray(np.matmul(e / total, v), dtype=q.dtype).transpose(1, 0, 2)


def _mask_of(call: RefCall, q: Any, k: Any, tables: Any) -> Any:
    """What the mask predicate keeps, [S, N], for query positions q [S] and key positions k [N]."""
    return evaluate_grid(call.attrs["mask"], q[:, None], k[None, :], tables)


def _positions(first: int, last: int) -> Array:
    return np.asarray(cast(Any, np.arange(first, last)))


def _bias_of(bias: Array | None, q: Any, k: Any) -> Any:
    """What is added by distance, [H, S, N]: slopes [H] times k - q (ALiBi, arXiv 2108.12409), or the number
    [H, N] at q - k, the last one beyond."""
    if bias is None:
        return 0.0
    distance = q[:, None] - k[None, :]
    if bias.ndim == 1:
        return -bias[:, None, None] * distance
    return bias[:, np.clip(distance, 0, bias.shape[1] - 1)]


def _attention_reference(call: RefCall) -> tuple[Array]:
    q, k, v, mask, sinks, by_distance = (call.arg(i) for i in range(6))
    positions = _positions(0, q.shape[2])
    keep: Any = True
    bias = _bias_of(by_distance, positions, positions)
    if mask is not None:
        mask = np.broadcast_to(mask, (1, q.shape[1], q.shape[2], q.shape[2]))[0]
        keep, bias = (mask, bias) if mask.dtype == np.bool_ else (True, bias + mask)
    elif call.attrs["mask"] is not None:
        keep = _mask_of(call, positions, positions, call.args[6:])
    out = attend(q[0], k[0], v[0], keep, bias, sinks, call.attrs["scale"], call.attrs["softcap"])
    return (out[None],)


def _kv_write_reference(call: RefCall) -> tuple[dict[str, Array]]:
    """Each stream's elements as its codes, at the tokens' slots."""
    state, fresh, slots = call.args[0], call.args[1:-1], call.args[-1]
    written = {name: array.copy() for name, array in state.items()}
    kv = cast(KV, call.types[0])
    for stream, x in zip(kv.streams, fresh, strict=True):
        for part, codes in encode(np.asarray(x), stream).items():
            layer = written[part][call.attrs["layer"]]
            flat = layer.reshape(-1, *layer.shape[2:])
            if np.size(slots) and not (0 <= np.min(slots) and np.max(slots) < len(flat)):
                raise IndexError(f"slots {np.min(slots)}..{np.max(slots)} leave a cache of {len(flat)} slots")
            flat[slots] = codes
    return (written,)


def _kv_seal_reference(call: RefCall) -> tuple[dict[str, Array]]:
    state, tail, table, tail_table, lens, starts = call.args
    kv, layer = cast(KV, call.types[0]), call.attrs["layer"]
    sealed = {name: array.copy() for name, array in state.items()}
    for r, total in enumerate(lens):
        before = total - (starts[r + 1] - starts[r])
        for i in range(before // kv.block, total // kv.block):
            for stream in kv.streams:
                exact = np.asarray(tail[stream.name][layer, tail_table[r, i]], call.float_type)
                for part, codes in encode(exact, stream).items():
                    sealed[part][layer, table[r, i]] = codes
    return (sealed,)


def _read(state: dict[str, Array], stream: Stream, layer: int, blocks: Any, dtype: Any) -> Array:
    """A request's keys or values, as the cache decodes to them: [heads, tokens, head_size]."""
    parts = {part: state[part][layer][blocks] for part in stream.parts}
    x = decode(parts, stream, dtype)
    return x.reshape(-1, *x.shape[2:]).transpose(1, 0, 2)


def _spans(kv: KV, begin: int, end: int) -> list[tuple[int, int]]:
    """Query positions begin..end in parts that read the same cache: with a tail those of one block do."""
    if not kv.needs_tail:
        return [(begin, end)] if begin < end else []
    edges = range(begin // kv.block * kv.block, end, kv.block)
    return [(max(begin, edge), min(end, edge + kv.block)) for edge in edges]


def _cached(call: RefCall, request: int, end: int) -> list[Array]:
    """A request's keys and values up to the query at end - 1; a tail has its own block's."""
    state, table, tail, tail_table = call.args[1], call.args[2], call.arg(TAIL), call.arg(TAIL + 1)
    kv, layer, dtype = cast(KV, call.types[1]), call.attrs["layer"], call.args[0].dtype
    blocks = table[request, : -(-end // kv.block)]
    found = [_read(state, s, layer, blocks, dtype)[:, :end] for s in kv.streams[:2]]
    if kv.needs_tail:
        own = (end - 1) // kv.block
        for array, stream in zip(found, cast(KV, call.types[TAIL]).streams, strict=False):
            exact = _read(tail, stream, layer, tail_table[request, [own]], dtype)
            array[:, own * kv.block :] = exact[:, : end - own * kv.block]
    return found


def _paged_attention_reference(call: RefCall) -> tuple[Array]:
    q, lens, starts, sinks, by_distance = (call.arg(i) for i in (0, 3, 4, 5, 6))
    kv, scores = cast(KV, call.types[1]), (call.attrs["scale"], call.attrs["softcap"])
    out = np.empty((q.shape[0], q.shape[1], kv.streams[1].head_size), q.dtype)
    for r, total in enumerate(lens):
        first, last = starts[r], starts[r + 1]
        if not 0 <= last - first <= total:
            raise ValueError(f"request {r} has {last - first} tokens in the step but {total} in the cache")
        for low, high in _spans(kv, total - (last - first), total):
            k, v = _cached(call, r, high)
            positions, keys = _positions(low, high), _positions(0, high)
            keep = _mask_of(call, positions, keys, call.args[FIRST_TABLE:])
            rows = slice(last - total + low, last - total + high)
            bias = _bias_of(by_distance, positions, keys)
            out[rows] = attend(q[rows].transpose(1, 0, 2), k, v, keep, bias, sinks, *scores)
    return (out,)


_ATTENTION = ("q", "k", "v", "mask?", "sinks?", "bias?", "tables*")
_PAGED = (
    "q", "kv", "table", "lens", "starts", "sinks?", "bias?", "tail?", "tail_table?", "tables*",
)  # fmt: skip
_SEAL = ("kv", "tail", "table", "tail_table", "lens", "starts")
_SCORES = {"scale": REQUIRED, "mask": None, "softcap": 0.0}
_PAGED_SCORES = {"layer": REQUIRED, "scale": REQUIRED, "mask": REQUIRED, "softcap": 0.0, "dtype": None}

OPS: tuple[OpDef, ...] = (
    OpDef("attention", _ATTENTION, _attention, _attention_reference, _SCORES, sequence_aware=True),
    OpDef(
        "kv_write", ("kv", "x*"), _kv_write, _kv_write_reference, {"layer": REQUIRED}, sequence_aware=True,
        rollback="truncate",
    ),
    OpDef(
        "kv_seal", _SEAL, _kv_seal, _kv_seal_reference, {"layer": REQUIRED}, sequence_aware=True,
        rollback="truncate",
    ),
    OpDef(
        "paged_attention", _PAGED, _paged_attention, _paged_attention_reference, _PAGED_SCORES,
        sequence_aware=True,
    ),
)  # fmt: skip
