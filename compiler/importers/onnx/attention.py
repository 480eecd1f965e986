"""Converters of ONNX's attention and rotary embedding (op set 23), and what those of onnxruntime share."""

from __future__ import annotations

from typing import Any

from compiler.importers.onnx.context import Context, Convert, Held
from compiler.importers.onnx.formula import axis, formula
from compiler.importers.onnx.gather import rows
from compiler.importers.onnx.shape import reshape, transpose, unsqueeze
from compiler.importers.onnx.shape import sizes as known_sizes
from compiler.importers.refused import ImportRefused
from ir.dims import normalize
from ir.predicates import CAUSAL
from ir.types import DType


def heads(c: Context, x: Held, count: int) -> Any:
    """[1,S,heads*size] as [1,heads,S,size]; four axes as they are."""
    x = c.tensor(x)
    if c.rank(x) == 4:
        return x
    batch, length, width = c.shape(x)
    if not count or not isinstance(width, int) or width % count:
        raise ImportRefused(f"{width} columns are not {count} heads")
    return transpose(c, reshape(c, x, (batch, length, count, width // count)), perm=(0, 2, 1, 3))


def attend(
    c: Context,
    q: Any,  # [1,H,S,D]
    k: Any,  # [1,G,S,D]
    v: Any,  # [1,G,S,E]
    mask: Held | None,
    predicate: Any,
    scale: float | None,
    softcap: float = 0.0,
    sinks: Any = None,
) -> Any:
    """The attention op, [1,S,H,E]. With a mask operand, predicate (None, or CAUSAL) holds besides."""
    width: Any = c.shape(q)[-1]
    factor = width**-0.5 if not scale else float(scale)
    if mask is not None:
        mask, predicate = _mask_operand(c, mask, predicate, c.shape(q)[2]), None
    elif predicate is None:
        predicate = True
    softened = float(softcap) or None
    return c.op("attention", q, k, v, mask, sinks, scale=factor, mask=predicate, softcap=softened)


def _mask_operand(c: Context, mask: Held, predicate: Any, length: Any) -> Any:
    """A mask, boolean or added to scores, with four axes; where it must be causal besides, with that too."""
    while c.rank(mask) < 4:
        mask = unsqueeze(c, mask, known_sizes([0]))
    if predicate is None:
        return c.tensor(mask)
    causal = formula(DType.BOOL, (1, 1, length, length), axis(3) <= axis(2))
    if c.dtype(mask) is DType.BOOL:
        return c.tensor(c.pointwise("and", mask, causal))
    low = c.op("full", shape=(), value=float("-inf"), dtype="f32")
    return c.op("where", c.tensor(causal), c.tensor(mask), low)


def _attention(
    c: Context,
    q: Held,
    k: Held,
    v: Held,
    mask: Held | None = None,
    past_k: Held | None = None,
    past_v: Held | None = None,
    valid: Held | None = None,
    *,
    is_causal: int = 0,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int = 0,
) -> Any:
    """Results: the output, the keys and values with those of the past (which is empty), scores."""
    if any(c.outputs[3:4]):
        raise ImportRefused("its scores are used, which no op gives")
    if valid is not None:
        raise ImportRefused("nonpad_kv_seqlen, a cache that the graph keeps itself, has no op")
    flat = c.rank(q) == 3
    q, k, v = heads(c, q, q_num_heads), heads(c, k, kv_num_heads), heads(c, v, kv_num_heads)
    out = attend(c, q, k, v, mask, CAUSAL if is_causal else None, scale, softcap)
    return (joined(c, out) if flat else c.op("transpose", out, perm=(0, 2, 1, 3)), k, v, None)


def joined(c: Context, out: Any) -> Any:
    """[1,S,H,E] as [1,S,H*E]."""
    batch, length, count, width = c.shape(out)
    return reshape(c, out, (batch, length, normalize(count * width)))


def rotate(c: Context, x: Any, cos: Any, sin: Any, interleaved: int) -> Any:
    """x [1,H,S,D], cos and sin [1,S,P]: the first 2P elements of each head."""
    cos, sin = (unsqueeze(c, t, known_sizes([1])) for t in (cos, sin))
    return c.op("rope", x, c.tensor(cos), c.tensor(sin), interleaved=bool(interleaved) or None)


def angles(c: Context, table: Held, positions: Held | None) -> Held:
    """[1,S,P] of a table [max,P] at positions [1,S]; without positions the table is [1,S,P] already."""
    if positions is None:
        return table
    c.check_rows(positions, table, c.shape(table)[0])
    return rows(c, table, positions, 0)


def _rotary(
    c: Context,
    x: Held,
    cos: Held,
    sin: Held,
    positions: Held | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Any:
    """Of [1,H,S,D], or of [1,S,H*D] and then in that shape again."""
    flat = c.rank(x) == 3
    wide = heads(c, x, num_heads)
    at = [angles(c, t, positions) for t in (cos, sin)]
    if rotary_embedding_dim and c.shape(at[0])[-1] != rotary_embedding_dim // 2:
        raise ImportRefused(f"cos has {c.shape(at[0])[-1]} columns for {rotary_embedding_dim} elements")
    made = rotate(c, wide, at[0], at[1], interleaved)
    return joined(c, transpose(c, made, perm=(0, 2, 1, 3))) if flat else made


TABLE: dict[str, Convert] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
}
