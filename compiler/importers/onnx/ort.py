"""Converters of onnxruntime's own attention ops, as its model builder writes them (domain com.microsoft)."""

from __future__ import annotations

from typing import Any

from compiler.importers.onnx.attention import angles, attend, heads, joined, rotate
from compiler.importers.onnx.context import Context, Convert, Held
from compiler.importers.onnx.formula import axis, formula
from compiler.importers.onnx.shape import transpose
from compiler.importers.refused import ImportRefused
from ir.predicates import CAUSAL, window
from ir.types import DType


def _packed(c: Context, x: Held, counts: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """[1,S,(H+2G)*D] as queries, keys and values."""
    width = c.shape(x)[-1]
    if not isinstance(width, int) or width % sum(counts):
        raise ImportRefused(f"{width} packed columns are not {' + '.join(map(str, counts))} heads")
    size = width // sum(counts)
    return c.op("split", c.tensor(x), axis=2, sizes=tuple(n * size for n in counts), several=True)


def _group_query_attention(
    c: Context,
    query: Held,
    key: Held | None = None,
    value: Held | None = None,
    past_key: Held | None = None,
    past_value: Held | None = None,
    seqlens_k: Held | None = None,
    total_sequence_length: Held | None = None,
    cos_cache: Held | None = None,
    sin_cache: Held | None = None,
    position_ids: Held | None = None,
    attention_bias: Held | None = None,
    head_sink: Held | None = None,
    *others: Held | None,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    smooth_softmax: int = 0,
    sliding_window_cache: int = 0,
    **attrs: Any,
) -> Any:
    """Causal attention over all keys, or over the last local_window_size. seqlens_k says how many keys a
    sequence has besides padding, of which there is none here. sliding_window_cache says how the past is kept.
    """
    _check_rest(c, others, attrs)
    if smooth_softmax and head_sink is None:
        raise ImportRefused("with smooth_softmax it has no op")
    counts = num_heads, kv_num_heads, kv_num_heads
    given = _packed(c, query, counts) if key is None or value is None else (query, key, value)
    q, k, v = (heads(c, x, n) for x, n in zip(given, counts, strict=True))
    if do_rotary:
        if cos_cache is None or sin_cache is None:
            raise ImportRefused("do_rotary without cos_cache and sin_cache")
        at = position_ids if position_ids is not None else _positions(c, q)
        cos, sin = (angles(c, t, at) for t in (cos_cache, sin_cache))
        q, k = (rotate(c, x, cos, sin, rotary_interleaved) for x in (q, k))
    predicate = CAUSAL & window(local_window_size) if local_window_size > 0 else CAUSAL
    sinks = None if head_sink is None else c.tensor(head_sink, DType.F32)
    if attention_bias is not None and local_window_size > 0:
        raise ImportRefused("with attention_bias and a window it has no op")
    out = attend(c, q, k, v, attention_bias, predicate, scale or None, softcap, sinks)
    return (joined(c, out), k, v, None)


def _check_rest(c: Context, others: Any, attrs: Any) -> None:
    given = [name for name, value in attrs.items() if value not in (0, 0.0, -1, "", "NONE")]
    if any(x is not None for x in others) or given or any(c.outputs[3:4]):
        named = f": {', '.join(given)}" if given else ""
        raise ImportRefused(f"it has operands or attributes that are not read{named}")


def _positions(c: Context, q: Any) -> Held:
    return formula(DType.I32, (1, c.shape(q)[2]), axis(1))


def _multi_head_attention(
    c: Context,
    query: Held,
    key: Held | None = None,
    value: Held | None = None,
    bias: Held | None = None,
    key_padding_mask: Held | None = None,
    attention_bias: Held | None = None,
    past_key: Held | None = None,
    past_value: Held | None = None,
    *others: Held | None,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    mask_filter_value: float = -10000.0,
    **attrs: Any,
) -> Any:
    """As many key as query heads; what it sees is in attention_bias, or all before if unidirectional."""
    _check_rest(c, others, attrs)
    if key is None or value is None:
        query, key, value = _packed(c, query, (num_heads,) * 3)
    parts = [query, key, value]
    if bias is not None:
        parts = [_with_bias(c, x, bias, i) for i, x in enumerate(parts)]
    if key_padding_mask is not None and not _is_ones(c, key_padding_mask):
        raise ImportRefused("its key_padding_mask is not all ones")
    q, k, v = (heads(c, x, num_heads) for x in parts)
    predicate = CAUSAL if unidirectional else None
    out = attend(c, q, k, v, attention_bias, predicate, scale or None)
    return (joined(c, out), k, v, None)


def _with_bias(c: Context, x: Held, bias: Held, part: int) -> Any:
    """x plus its third of a bias [H*D + H*D + H*E]."""
    width: Any = c.shape(x)[-1]
    cut = c.op("slice", c.tensor(bias), axis=0, start=part * width, stop=(part + 1) * width)
    return c.op("add", c.tensor(x), cut)


def _is_ones(c: Context, mask: Held) -> bool:
    found = c.as_formula(mask)
    return found is not None and found.is_constant and bool(found.expr == 1 or found.expr == True)  # noqa: E712


def _rotary(
    c: Context,
    x: Held,
    positions: Held,
    cos: Held,
    sin: Held,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    is_packed_batching: int = 0,
    scale: float = 1.0,
) -> Any:
    """positions [1,S], or [1]: of the first token."""
    if is_packed_batching or scale != 1.0:
        raise ImportRefused("with is_packed_batching or a scale it has no op")
    flat = c.rank(x) == 3
    length = c.shape(x)[1 if flat else 2]
    at = _from(c, positions, length)
    pairs: Any = c.shape(cos)[-1]
    count = num_heads or _heads_of(c, x, rotary_embedding_dim or 2 * pairs)
    wide = heads(c, x, count)
    made = rotate(c, wide, angles(c, cos, at), angles(c, sin, at), interleaved)
    return joined(c, transpose(c, made, perm=(0, 2, 1, 3))) if flat else made


def _heads_of(c: Context, x: Held, size: int) -> int:
    width: Any = c.shape(x)[-1]
    return width // size


def _from(c: Context, positions: Held, length: Any) -> Held:
    if c.shape(positions) != (1,):
        return positions
    first = c.as_formula(positions)
    if first is None:
        raise ImportRefused("the first token's position depends on the tokens")
    return formula(DType.I32, (1, length), first.expr + axis(1))


TABLE: dict[str, Convert] = {
    "com.microsoft.GroupQueryAttention": _group_query_attention,
    "com.microsoft.MultiHeadAttention": _multi_head_attention,
    "com.microsoft.RotaryEmbedding": _rotary,
}
