"""Linear recurrences: a matrix for each head, to which every token adds what its query then reads.

    S <- S * exp(decay);  u = v, or with beta (the delta rule) beta * (v - k S);  S <- S + k u;  y = q S

with S [K,V] from zero. That is linear attention with decay, of one number for each head (Mamba-2, arXiv
2405.21060; Gated DeltaNet, arXiv 2412.06464) or for each channel of the keys (Kimi Delta Attention, arXiv
2510.26692). With rates [H,K,V] the decay of S[k,v] is decay[v] * rates[k,v] (Mamba, arXiv 2312.00752).

Letters as in docs/ir.md: T tokens, R requests, H heads of values, G of keys, K and V their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from ir.dims import Dim
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall
from ir.ops.tables import check_layer, check_tables
from ir.types import KV, DType, Stream, Tensor, Type

_INPUTS = ("key", "value", "decay", "beta")  # streams of what a token adds
_RATES = {"recurrence": 5, "paged_recurrence": 9}  # operand of each form


def recurrence_streams(
    key: tuple[int, int], value: tuple[int, int], decay: int, has_beta: bool
) -> tuple[Stream, ...]:
    """What a state group keeps of a recurrence's tokens, and the state before each block.

    key, value: heads and size. decay: its size for each head of values.
    """
    heads, size = value
    inputs = [Stream("key", DType.F32, *key), Stream("value", DType.F32, *value)]
    inputs.append(Stream("decay", DType.F32, heads, decay))
    inputs += [Stream("beta", DType.F32, heads, 1)] if has_beta else []
    return (*inputs, Stream("state", DType.F32, heads, key[1] * size, per_block=True))


def _check(call: Call, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None) -> None:
    """Operands as [heads, size] after the axes of tokens, in the order of q, k, v, decay, beta."""
    dtypes = {x.dtype for x in (q, k, v, decay, *([beta] if beta else []))}
    if len(dtypes) != 1 or not q.dtype.is_float:
        call.fail(f"operands must have one float type, not {sorted(dtypes)}")
    (groups, keys), (heads, size) = k.shape[-2:], v.shape[-2:]
    if q.shape != k.shape or not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        call.fail(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit")
    rates = call.optional(_RATES[call.kind])
    if rates is not None and (rates.shape != (heads, keys, size) or not rates.dtype.is_float):
        call.fail(f"rates {rates.dtype}{list(rates.shape)} are not floats [{heads},{keys},{size}]")
    sizes: tuple[Dim, ...] = (1, keys) if rates is None else (size,)
    if decay.shape[:-1] != v.shape[:-1] or decay.shape[-1] not in sizes:
        call.fail(f"decay {list(decay.shape)} is not v's with a last axis of {' or '.join(map(str, sizes))}")
    if beta is not None and beta.shape != (*v.shape[:-1], 1):
        call.fail(f"beta {list(beta.shape)} is not v's with a last axis of 1")


def _recurrence(call: Call) -> tuple[Type, ...]:
    given = [call.tensor(i) for i in range(4)]
    beta = call.optional(4)
    if any(x.rank != 4 or x.shape[0] != 1 for x in (*given, *([beta] if beta else []))):
        call.fail("operands must be [1,heads,S,size]")
    turned = [Tensor(x.dtype, (x.shape[2], x.shape[1], x.shape[3])) for x in given]
    q, k, v, decay = turned
    turned_beta = None if beta is None else Tensor(beta.dtype, (beta.shape[2], beta.shape[1], beta.shape[3]))
    if q.shape[0] != v.shape[0]:
        call.fail(f"q of {q.shape[0]} tokens and v of {v.shape[0]}")
    _check(call, q, k, v, decay, turned_beta)
    return (Tensor(v.dtype, (1, *v.shape)),)


def _paged_recurrence(call: Call) -> tuple[Type, ...]:
    kv, (q, k, v, decay), beta = call.kv(0), (call.tensor(i) for i in range(1, 5)), call.optional(8)
    if any(x.rank != 3 for x in (q, k, v, decay, *([beta] if beta else []))) or q.shape[0] != v.shape[0]:
        call.fail("operands must be [T,heads,size]")
    _check(call, q, k, v, decay, beta)
    check_layer(call, kv)
    check_tables(call, call.tensor(5), call.tensor(6), call.tensor(7))
    key, value = cast("tuple[tuple[int, int], tuple[int, int]]", (k.shape[1:], v.shape[1:]))
    if kv.streams != recurrence_streams(key, value, cast(int, decay.shape[-1]), beta is not None):
        call.fail("the state's streams are not those of the recurrence")
    return (Tensor(v.dtype, v.shape), kv)


def advance(
    state: Array,  # [H, K, V]
    k: Array,  # [G, K]
    v: Array,  # [H, V]
    decay: Array,  # [H, 1], [H, K] or, with rates, [H, V]
    beta: Array | None,  # [H, 1]
    rates: Array | None,  # [H, K, V]
) -> Array:
    """The state after a token."""
    k = np.repeat(k, len(v) // len(k), 0)
    factors = decay[:, :, None] if rates is None else decay[:, None, :] * rates
    state = state * np.exp(factors)
    u = v if beta is None else beta * (v - np.einsum("hk,hkv->hv", k, state))
    return state + k[:, :, None] * u[:, None, :]


def read(state: Array, q: Array) -> Array:
    """What queries [G,K] read: [H,V]."""
    return np.einsum("hk,hkv->hv", np.repeat(q, len(state) // len(q), 0), state)


def _recurrence_reference(call: RefCall) -> tuple[Array]:
    q, k, v, decay, beta, rates = (call.arg(i) for i in range(6))
    q, k, v, decay = (x[0].transpose(1, 0, 2) for x in (q, k, v, decay))
    betas = [None] * len(v) if beta is None else beta[0].transpose(1, 0, 2)
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), v.dtype)
    out = np.empty(v.shape, v.dtype)
    for t, (own, x, g, b) in enumerate(zip(k, v, decay, betas, strict=True)):
        state = advance(state, own, x, g, b, rates)
        out[t] = read(state, q[t])
    return (out[None],)


class _Cached:
    """One layer of a state group, as a request's tokens read and write it."""

    def __init__(
        self, layer: dict[str, Array], row: Iterable[int], block: int, shape: tuple[int, ...]
    ) -> None:
        self._layer, self._row, self._block, self._shape = layer, list(row), block, shape

    def inputs(self, position: int) -> list[Any]:
        """k, v, decay and beta of a token; None for a beta that there is not."""
        place = (self._row[position // self._block], position % self._block)
        return [self._layer[n][place] if n in self._layer else None for n in _INPUTS]

    def before(self, position: int, rates: Array | None) -> Array:
        """The state that a token starts from."""
        if position == 0:
            return np.zeros(self._shape, self._layer["state"].dtype)
        first = (position - 1) // self._block * self._block
        state = self._layer["state"][self._row[first // self._block]].reshape(self._shape)
        for t in range(first, position):
            k, v, decay, beta = self.inputs(t)
            state = advance(state, k, v, decay, beta, rates)
        return state

    def write(self, position: int, state: Array, *inputs: Any) -> None:
        """A token's inputs and, where it begins a block, the state before it; nothing in a block left out."""
        block = self._row[position // self._block]
        if block < 0:
            return
        if position % self._block == 0:
            self._layer["state"][block] = state.reshape(len(state), -1)
        for name, x in zip(_INPUTS, inputs, strict=True):
            if x is not None:
                self._layer[name][block, position % self._block] = x


def _paged_recurrence_reference(call: RefCall) -> tuple[Array, dict[str, Array]]:
    kept, q, k, v, decay, table, lens, starts, beta, rates = (call.arg(i) for i in range(10))
    written = {name: array.copy() for name, array in kept.items()}
    layer = {name: array[call.attrs["layer"]] for name, array in written.items()}
    block = cast(KV, call.types[0]).block
    out = np.empty(v.shape, v.dtype)
    for r, total in enumerate(lens):
        first = total - (starts[r + 1] - starts[r])
        if not 0 <= first <= total:
            raise ValueError(f"request {r} has {total - first} tokens in the step but {total} in the cache")
        cached = _Cached(layer, table[r], block, (v.shape[1], k.shape[2], v.shape[2]))
        state = cached.before(first, rates) if first < total else None
        for position, t in enumerate(range(starts[r], starts[r + 1]), first):
            inputs = (k[t], v[t], decay[t], None if beta is None else beta[t])
            cached.write(position, cast(Array, state), *inputs)
            state = advance(cast(Array, state), *inputs, rates)
            out[t] = read(state, q[t])
    return out, written


_OPERANDS = ("q", "k", "v", "decay", "beta?", "rates?")
_PAGED = ("kv", "q", "k", "v", "decay", "table", "lens", "starts", "beta?", "rates?")

OPS: tuple[OpDef, ...] = (
    OpDef("recurrence", _OPERANDS, _recurrence, _recurrence_reference, sequence_aware=True),
    OpDef(
        "paged_recurrence", _PAGED, _paged_recurrence, _paged_recurrence_reference, {"layer": REQUIRED},
        sequence_aware=True, rollback="truncate",
    ),
)  # fmt: skip
