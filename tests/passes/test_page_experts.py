"""page_kv on mixtures of experts: the paged form computes the imported one, or refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.dims import symbol
from ir.graph import Graph, Value
from ir.interpret import interpret
from ir.predicates import CAUSAL
from ir.verify import verify
from passes.base import PassError
from passes.page_kv import PageKv
from passes.select_rows import SelectRows
from tests.passes.test_page_kv import VOCAB, WIDTH, Toy, run_paged, weight, weights

S = symbol("S")
E, CHOSEN, INNER = 5, 2, 7


def routed(toy: Toy, x: Value) -> tuple[Value, Value]:
    """Weights and experts of rows x."""
    scores = toy.b.op("linear", x, weight("router", E, WIDTH))
    _, experts = toy.b.op("topk", scores, k=CHOSEN, several=True)
    return toy.b.op("take_along", toy.b.op("sigmoid", scores), experts), experts


def flat_experts(toy: Toy) -> Value:
    """On rows [S, H], as transformers writes it: the first linear reads tokens' rows, the second slots'."""
    x = toy.b.op("reshape", toy.x, shape=(S, WIDTH))
    scale, experts = routed(toy, x)
    bias = weight("bias", E, 2 * INNER)
    up = toy.b.op(
        "moe_linear", x, weight("up", E * 2 * INNER, WIDTH), experts, bias, num_experts=E, gated=True
    )
    down = toy.b.op("moe_linear", up, weight("down", E * WIDTH, INNER), experts, num_experts=E)
    weighted = toy.b.op("mul", down, toy.b.op("reshape", scale, shape=(S, CHOSEN, 1)))
    return toy.b.op("reshape", toy.b.op("sum", weighted, axes=(1,)), shape=(1, S, WIDTH))


def batched_experts(toy: Toy) -> Value:
    scale, experts = routed(toy, toy.x)
    y = toy.b.op("moe_linear", toy.x, weight("up", E * WIDTH, WIDTH), experts, num_experts=E)
    return toy.b.op("sum", toy.b.op("mul", y, toy.b.op("reshape", scale, shape=(1, S, CHOSEN, 1))), axes=(2,))


def dense_experts(toy: Toy) -> Value:
    """All experts on all tokens: one row for all matrices, then one for each; then weighted by a softmax."""
    x = toy.b.op("reshape", toy.x, shape=(S, WIDTH))
    up = toy.b.op("relu", toy.b.op("matmul", x, weight("up", E, WIDTH, INNER)))
    down = toy.b.op("matmul", up, weight("down", 1, E, INNER, WIDTH))
    scores = toy.b.op("softmax", toy.b.op("linear", x, weight("router", E, WIDTH)), axis=1)
    scale = toy.b.op("reshape", toy.b.op("transpose", scores, perm=(1, 0)), shape=(1, E, S, 1))
    return toy.b.op("sum", toy.b.op("mul", down, scale), axes=(1,))


def head_matrices(toy: Toy) -> Value:
    """A matrix for each head, as latent attention has them."""
    heads = toy.heads(toy.x, "q", E)
    y = toy.b.op("matmul", heads, weight("up", E, 5, 6))
    return toy.b.op("reshape", toy.b.op("transpose", y, perm=(0, 2, 1, 3)), shape=(1, S, WIDTH))


MODELS = [flat_experts, batched_experts, dense_experts, head_matrices]


def model(block: Any) -> Graph:
    toy = Toy()
    return toy.graph(toy.attend(toy.b.op("add", toy.x, block(toy)), 0, CAUSAL))


@pytest.mark.parametrize("block", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_the_paged_form_gives_the_imported_forms_logits(block: Any, chunk: int) -> None:
    graph = model(block)
    read = weights(graph)
    selected = SelectRows().run(PageKv().run(graph).graph).graph
    verify(selected)
    requests = [np.random.default_rng().integers(0, VOCAB, n) for n in (1, 16, 33, 17)]
    for got, ids in zip(run_paged(selected, read, requests, chunk), requests, strict=True):
        whole = interpret(graph, {"ids": ids[None], "pos": np.arange(len(ids))[None]}, read, np.float64)
        np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [flat_experts, batched_experts, dense_experts, head_matrices])
def test_tokens_are_the_first_axis_of_linears_of_experts(block: Any) -> None:
    paged = PageKv().run(model(block)).graph
    linears = [op for op in paged.ops if op.kind == "moe_linear"]
    assert linears and all(op.outs[0].type.shape[0] == symbol("T") for op in linears)  # type: ignore[union-attr]
    assert not any(op.kind == "matmul" for op in paged.ops)


def largest_tokens(toy: Toy) -> Value:
    turned = toy.b.op("transpose", toy.x, perm=(0, 2, 1))
    values, _ = toy.b.op("topk", turned, k=1, several=True, loc="model.pool")
    return toy.b.op("reshape", values, shape=(1, 1, WIDTH))


def another_token(toy: Toy) -> Value:
    turned = toy.b.op("transpose", toy.x, perm=(0, 2, 1))
    first = toy.b.op("expand", toy.b.op("reshape", toy.pos, shape=(1, 1, S)), shape=(1, WIDTH, S))
    return toy.b.op("transpose", toy.b.op("take_along", turned, first, loc="model.pool"), perm=(0, 2, 1))


def experts_along_tokens(toy: Toy) -> Value:
    """Token t reads what the t-th expert of one list gives: the slots are the tokens."""
    experts = toy.b.op(
        "reshape", toy.b.op("mod", toy.pos, toy.b.op("full", shape=(), value=E, dtype="i32")), shape=(S,)
    )
    x = toy.b.op("reshape", toy.x, shape=(S, WIDTH))
    y = toy.b.op("moe_linear", x, weight("up", E * WIDTH, WIDTH), experts, num_experts=E, loc="model.pool")
    return toy.b.op("reshape", y, shape=(1, S, WIDTH))


@pytest.mark.parametrize("mix", [largest_tokens, another_token, experts_along_tokens])
def test_what_chooses_among_tokens_is_refused_with_its_location(mix: Any) -> None:
    graph = model(mix)
    verify(graph)
    with pytest.raises(PassError, match=r"model\.pool.*along the tokens|along the tokens.*model\.pool"):
        PageKv().run(graph)
