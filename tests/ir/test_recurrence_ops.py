"""Recurrences against the products of matrices that they stand for, and paged ones against whole ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.interpret import InterpretError, empty_kv, interpret
from ir.ops import InferError
from ir.ops.recurrence import recurrence_streams
from ir.types import KV, DType, Tensor
from tests.ir.run import result

G, H, K, V = 2, 4, 5, 3
KINDS = [(d, b) for d in ("head", "key") for b in (False, True)] + [("rates", False), ("rates", True)]


def problem(tokens: int, decay: str, has_beta: bool) -> list[Any]:
    """q, k, v, decay, beta and rates, heads first."""
    rng = np.random.default_rng(tokens + 100 * has_beta)
    q, k = rng.normal(size=(2, 1, G, tokens, K))
    v = rng.normal(size=(1, H, tokens, V))
    last = {"head": 1, "key": K, "rates": V}[decay]
    g = -rng.exponential(size=(1, H, tokens, last)) * (-1 if decay == "rates" else 1)
    beta = rng.uniform(0, 1, (1, H, tokens, 1)) if has_beta else None
    rates = -rng.exponential(size=(H, K, V)) if decay == "rates" else None
    return [q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, g, beta, rates]


def by_matrices(q: Any, k: Any, v: Any, decay: Any, beta: Any, rates: Any) -> Any:
    """[1,S,H,V]: each column of each head's state is moved on by a matrix of its own."""
    out = np.zeros((1, v.shape[2], H, V))
    for h in range(H):
        for c in range(V):
            column = np.zeros(K)
            for t in range(v.shape[2]):
                key, g = k[0, h // (H // G), t], decay[0, h, t]
                factors = np.exp(g if rates is None else g[c] * rates[h, :, c]) * np.ones(K)
                b = 1.0 if beta is None else beta[0, h, t, 0]
                forget = np.eye(K) - (0 if beta is None else b * np.outer(key, key))
                column = forget @ np.diag(factors) @ column + b * key * v[0, h, t, c]
                out[0, t, h, c] = q[0, h // (H // G), t] @ column
    return out


@pytest.mark.parametrize(("decay", "has_beta"), KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_recurrence(tokens: int, decay: str, has_beta: bool) -> None:
    given = problem(tokens, decay, has_beta)
    found = result("recurrence", *given, wide=True)
    np.testing.assert_allclose(found, by_matrices(*given), rtol=1e-11, atol=1e-12)


def state_of(decay: str, has_beta: bool, block: int) -> KV:
    last = {"head": 1, "key": K, "rates": V}[decay]
    return KV(recurrence_streams((G, K), (H, V), last, has_beta), 2, block, state=True)


def step(
    state: dict[str, Any], kv: KV, rows: list[Any], table: Any, lens: Any, starts: Any, layer: int
) -> Any:
    """One step of tokens [T,..], and the state after it."""
    builder = GraphBuilder("step", {"T": (0, None), "R": (1, None), "M": (1, None)})
    held = builder.input("kv", kv)
    inputs: dict[str, Any] = {"kv": state}
    args: list[Any] = [held]
    *tokens, beta, rates = rows
    for name, x in zip("qkvgb", (*tokens, beta), strict=True):
        shape = None if x is None else (symbol("T"), *x.shape[1:])
        args.append(None if shape is None else builder.input(name, Tensor(DType.F32, shape)))
        inputs |= {} if x is None else {name: x}
    beta_value = args.pop()
    for name, x, shape in (
        ("table", table, ("R", "M")),
        ("lens", lens, ("R",)),
        ("starts", starts, ("R+1",)),
    ):
        dims = tuple(symbol("R") + 1 if d == "R+1" else symbol(d) for d in shape)
        args.append(builder.input(name, Tensor(DType.I32, dims)))
        inputs[name] = np.asarray(x, np.int32)
    rates_value = None if rates is None else builder.input("rates", Tensor(DType.F32, rates.shape))
    inputs |= {} if rates is None else {"rates": rates}
    outs = builder.op("paged_recurrence", *args, beta_value, rates_value, several=True, layer=layer)
    return interpret(builder.graph(outs), inputs, {}, np.float64).outputs


@pytest.mark.parametrize(("decay", "has_beta"), KINDS)
@pytest.mark.parametrize("block", [1, 4, 16])
def test_steps_give_the_bits_of_one_piece(block: int, decay: str, has_beta: bool) -> None:
    """Two requests in chunks, each after one of rejected tokens; blocks that nobody reads are left out."""
    lengths, rng = (19, 33), np.random.default_rng(block)
    given = [problem(n, decay, has_beta) for n in lengths]
    whole = [result("recurrence", *g[:5], given[0][5], wide=True)[0] for g in given]
    rows: list[list[Any]] = [[None if x is None else x[0].transpose(1, 0, 2) for x in g[:5]] for g in given]
    kv, rates = state_of(decay, has_beta, block), given[0][5]
    most = -(-max(lengths) // block) + 1
    state = empty_kv(kv, 2 * most)
    own = np.arange(2 * most).reshape(2, most)[:, ::-1]
    at = [0, 0]
    while at != list(lengths):
        counts = [int(min(n - a, rng.integers(0, 8))) for n, a in zip(lengths, at, strict=True)]
        for rejected in (True, False):
            table = own.copy()
            if not rejected:  # what lies before the block of the last token is read no more after the step
                for r in (0, 1):
                    kept = max(0, at[r] + counts[r] - 1) // block
                    first = -(-at[r] // block)  # partial blocks are there already
                    table[r, first:kept] = -1
            taken = [
                None if x is None else np.concatenate([rows[r][i][at[r] : at[r] + counts[r]] for r in (0, 1)])
                for i, x in enumerate(rows[0])
            ]
            if rejected:
                taken = [None if x is None else x + 1 for x in taken]
            lens = [a + c for a, c in zip(at, counts, strict=True)]
            out, state = step(state, kv, [*taken, rates], table, lens, [0, counts[0], sum(counts)], layer=1)
        for r, part in enumerate(np.split(out, [counts[0]])):
            np.testing.assert_array_equal(part, whole[r][at[r] : at[r] + counts[r]])
        at = lens
    assert all(np.isnan(np.asarray(array[0], np.float64)).all() for array in state.values()), "another layer"


def test_refused() -> None:
    given: list[Any] = problem(3, "rates", has_beta=True)
    q, k, v, g, beta, rates = given
    for wrong in (
        (q, k, v[:, :3], g, beta, rates),
        (q[..., :2], k, v, g, beta, rates),
        (q, k, v, g[..., :2], beta, rates),
        (q, k, v, g, beta[:, :2], rates),
        (q, k, v, g, beta, rates[:, :2]),
        (q, k, v, g, beta),
    ):
        with pytest.raises(InferError):
            result("recurrence", *wrong, wide=True)
    rows = [x[0].transpose(1, 0, 2) for x in (q, k, v, g, beta)]
    kv = state_of("rates", True, 4)
    with pytest.raises(InferError, match="streams"):
        step({}, state_of("head", True, 4), [*rows, rates], [[0]], [3], [0, 3], layer=0)
    with pytest.raises(InterpretError, match="3 tokens in the step but 2"):
        step(empty_kv(kv, 1), kv, [*rows, rates], [[0]], [2], [0, 3], layer=0)
