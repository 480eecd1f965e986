"""page_kv: the paged form computes what the imported form computes, and refuses what mixes tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Scalar, Value, Weight
from ir.interpret import empty_kv, interpret
from ir.predicates import CAUSAL, window
from ir.text import parse, print_graph
from ir.types import DType, Tensor
from ir.verify import verify
from passes.base import PassError
from passes.page_kv import PageKv
from passes.select_rows import SelectRows

S = symbol("S")
HEADS, KV_HEADS, SIZE, WIDTH, VOCAB = 6, 2, 5, 30, 11


def weight(name: str, *shape: int, dtype: DType = DType.F32) -> Weight:
    return Weight(name, Tensor(dtype, shape))


class Toy:
    """A model of two attentions over which a test can put one more op."""

    def __init__(self) -> None:
        self.b = GraphBuilder("toy", {"S": (1, 40)})
        self.ids = self.b.input("ids", Tensor(DType.I32, (1, S)))
        self.pos = self.b.input("pos", Tensor(DType.I32, (1, S)))
        self.x = self.b.op("embed", self.ids, weight("embed", VOCAB, WIDTH), name="x")

    def heads(self, x: Value, name: str, heads: int) -> Value:
        y = self.b.op("linear", x, weight(name, heads * SIZE, WIDTH), loc=f"model.{name}")
        y = self.b.op("reshape", y, shape=(1, S, heads, SIZE))
        return self.b.op("transpose", y, perm=(0, 2, 1, 3))

    def attend(self, x: Value, layer: int, mask: object) -> Value:
        q, k, v = (
            self.heads(x, f"{n}{layer}", h) for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        o = self.b.op("attention", q, k, v, scale=0.4, mask=mask, name=f"o{layer}", loc=f"model.attn{layer}")
        return self.b.op("add", x, self.b.op("reshape", o, shape=(1, S, WIDTH)))

    def graph(self, x: Value) -> Graph:
        y = self.b.op("linear", x, weight("head", VOCAB, WIDTH), name="logits", loc="model.head")
        return self.b.graph([y])


def weights(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng()
    return {w.name: rng.normal(size=w.type.shape, scale=0.2).astype(np.float32) for w in graph.weights}  # type: ignore[union-attr]


def two_layers() -> Graph:
    toy = Toy()
    return toy.graph(toy.attend(toy.attend(toy.x, 0, window(8) & CAUSAL), 1, CAUSAL))


def run_paged(
    graph: Graph, read: dict[str, np.ndarray], requests: list[np.ndarray], chunk: int
) -> list[np.ndarray]:
    """Logits of each request's tokens, all requests packed together, `chunk` tokens of each a step."""
    taken = {v.name for v in graph.inputs}
    states = {v.name: v.type for v in graph.inputs if v.name.startswith("kv")}
    kv = {name: empty_kv(type, 64) for name, type in states.items()}  # type: ignore[arg-type]
    blocks = {
        n: np.random.default_rng(i).permutation(64).reshape(len(requests), -1) for i, n in enumerate(states)
    }
    found: list[list[np.ndarray]] = [[] for _ in requests]
    for first in range(0, max(map(len, requests)), chunk):
        live = [r for r, ids in enumerate(requests) if first < len(ids)]
        ends = [min(first + chunk, len(requests[r])) for r in live]
        pos = np.concatenate([np.arange(first, end) for end in ends])
        owner = np.repeat(live, [end - first for end in ends])
        inputs: dict[str, object] = {
            "ids": np.concatenate([requests[r][first:end] for r, end in zip(live, ends, strict=True)]),
            "pos": pos, "lens": np.array(ends), "starts": np.cumsum([0, *(e - first for e in ends)]),
            "rows": np.arange(len(pos)),
        }  # fmt: skip
        for name, type in states.items():
            inputs[name] = kv[name]
            if f"slots{name[2:]}" in taken:  # not of a recurrence's state
                inputs[f"slots{name[2:]}"] = (
                    blocks[name][owner, pos // type.block] * type.block + pos % type.block  # type: ignore[union-attr]
                )
            inputs[f"table{name[2:]}"] = blocks[name][live][:, :3]
        run = interpret(graph, inputs, read, np.float64)
        kv = dict(zip(states, run.outputs[1:], strict=True))
        for r in live:
            found[r].append(run.outputs[0][owner == r])
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_the_paged_form_gives_the_imported_forms_logits(chunk: int) -> None:
    graph = two_layers()
    read = weights(graph)
    paged = PageKv().run(graph).graph
    verify(paged)
    selected = SelectRows().run(paged).graph
    verify(selected)
    requests = [np.random.default_rng().integers(0, VOCAB, n) for n in (1, 16, 33, 17)]
    for got, ids in zip(run_paged(selected, read, requests, chunk), requests, strict=True):
        whole = interpret(graph, {"ids": ids[None], "pos": np.arange(len(ids))[None]}, read, np.float64)
        np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


def test_layers_of_unequal_lifetime_get_groups_of_their_own() -> None:
    paged = PageKv().run(two_layers()).graph
    kinds = [v.type for v in paged.inputs if v.name.startswith("kv")]
    assert [(k.window, k.layers, k.block) for k in kinds] == [(8, 1, 16), (None, 1, 16)]  # type: ignore[union-attr]
    assert parse(print_graph(paged)) == paged


def test_a_layer_that_reads_anothers_keys_and_values_shares_them() -> None:
    toy = Toy()
    q, k, v = toy.heads(toy.x, "q", HEADS), toy.heads(toy.x, "k", KV_HEADS), toy.heads(toy.x, "v", KV_HEADS)
    outs = [toy.b.op("attention", q, k, v, scale=s, mask=CAUSAL) for s in (0.1, 0.2)]
    graph = toy.graph(toy.b.op("reshape", toy.b.op("add", *outs), shape=(1, S, WIDTH)))
    paged = PageKv().run(graph).graph
    assert sum(op.kind == "kv_write" for op in paged.ops) == 1
    assert [op.attrs["layer"] for op in paged.ops if op.kind == "paged_attention"] == [0, 0]


def stacked(b: GraphBuilder, x: Value) -> Value:
    """Streams on an axis before the tokens': stacked, taken apart, mixed within each token, averaged."""
    parts = [b.op("reshape", b.op("mul", x, Scalar(f)), shape=(1, 1, S, WIDTH)) for f in (1.0, -0.5, 2.0)]
    low, high = b.op("split", b.op("concat", *parts, axis=0), axis=0, sizes=(1, 2), several=True)
    four = b.op("concat", high, b.op("exp", b.op("slice", high, axis=0, start=1, stop=2)), low, axis=0)
    picked = b.op("take", four, weight("order", 5, dtype=DType.I32), axis=0)
    within = b.op("softmax", b.op("transpose", picked, perm=(1, 2, 3, 0)), axis=3)
    mixed = b.op("matmul", within, weight("mix", 5, 5))
    one = b.op("slice", low, axis=0, start=0, stop=1)
    return b.op("mean", b.op("add", b.op("transpose", mixed, perm=(3, 0, 1, 2)), one), axes=(0,))


def test_an_axis_before_the_tokens_is_one_of_each_token() -> None:
    toy = Toy()
    graph = toy.graph(toy.attend(stacked(toy.b, toy.x), 0, CAUSAL))
    read = {**weights(graph), "order": np.array([3, 0, 2, 2, 1])}
    selected = SelectRows().run(PageKv().run(graph).graph).graph
    verify(selected)
    requests = [np.random.default_rng().integers(0, VOCAB, n) for n in (1, 16, 33, 17)]
    for got, ids in zip(run_paged(selected, read, requests, 7), requests, strict=True):
        whole = interpret(graph, {"ids": ids[None], "pos": np.arange(len(ids))[None]}, read, np.float64)
        np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


def recurrent(toy: Toy, x: Value, layer: int) -> Value:
    """A recurrence of four heads of values to two of keys, with a decay of each head and the delta rule."""
    q, k = (toy.heads(x, f"{n}r{layer}", KV_HEADS) for n in "qk")
    v = toy.heads(x, f"vr{layer}", HEADS)
    ones = [toy.b.op("slice", v, axis=3, start=i, stop=i + 1) for i in (0, 1)]
    decay, beta = toy.b.op("neg", toy.b.op("exp", ones[0])), toy.b.op("sigmoid", ones[1])
    y = toy.b.op("recurrence", q, k, v, decay, beta, name=f"y{layer}", loc=f"model.mixer{layer}")
    return toy.b.op("add", x, toy.b.op("reshape", y, shape=(1, S, WIDTH)))


def hybrid() -> Graph:
    toy = Toy()
    return toy.graph(recurrent(toy, toy.attend(recurrent(toy, toy.x, 0), 1, CAUSAL), 2))


@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_a_recurrence_goes_on_from_a_group_of_its_state(chunk: int) -> None:
    graph = hybrid()
    read = weights(graph)
    paged = SelectRows().run(PageKv().run(graph).graph).graph
    verify(paged)
    kinds = [v.type for v in paged.inputs if v.name.startswith("kv")]
    assert [(k.state, k.layers, k.block) for k in kinds] == [(True, 2, 16), (False, 1, 16)]  # type: ignore[union-attr]
    assert [op.attrs["layer"] for op in paged.ops if op.kind == "paged_recurrence"] == [0, 1]
    assert {"slots1", "table0", "table1"} < {v.name for v in paged.inputs}
    assert "slots0" not in {v.name for v in paged.inputs}
    assert parse(print_graph(paged)) == paged
    requests = [np.random.default_rng().integers(0, VOCAB, n) for n in (1, 16, 33, 17)]
    for got, ids in zip(run_paged(paged, read, requests, chunk), requests, strict=True):
        whole = interpret(graph, {"ids": ids[None], "pos": np.arange(len(ids))[None]}, read, np.float64)
        np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


def test_a_decay_that_is_the_same_for_all_tokens_is_one_of_each() -> None:
    toy = Toy()
    q, k, v = toy.heads(toy.x, "q", KV_HEADS), toy.heads(toy.x, "k", KV_HEADS), toy.heads(toy.x, "v", HEADS)
    decay = toy.b.op("expand", weight("decay", 1, HEADS, 1, 1), shape=(1, HEADS, S, 1))
    y = toy.b.op("recurrence", q, k, v, decay, name="y", loc="model.mixer")
    graph = toy.graph(toy.b.op("reshape", y, shape=(1, S, WIDTH)))
    read = weights(graph)
    (got,) = run_paged(SelectRows().run(PageKv().run(graph).graph).graph, read, [ids := np.arange(9)], 4)
    whole = interpret(graph, {"ids": ids[None], "pos": ids[None]}, read, np.float64)
    np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


def mean_over_tokens(toy: Toy) -> Value:
    return toy.b.op("sub", toy.x, toy.b.op("mean", toy.x, axes=(1,), keepdims=True, loc="model.pool"))


def cumsum_over_tokens(toy: Toy) -> Value:
    return toy.b.op("cumsum", toy.x, axis=1, loc="model.pool")


def softmax_over_tokens(toy: Toy) -> Value:
    return toy.b.op("softmax", toy.x, axis=1, loc="model.pool")


def causal_conv(toy: Toy) -> Value:
    x = toy.b.op("transpose", toy.x, perm=(0, 2, 1))
    x = toy.b.op("conv1d", x, weight("conv", WIDTH, 1, 3), groups=WIDTH, padding=2, loc="model.pool")
    x = toy.b.op("slice", x, axis=2, start=0, stop=S, loc="model.pool")
    return toy.b.op("transpose", x, perm=(0, 2, 1))


def log_length_scale(toy: Toy) -> Value:
    size = toy.b.op("dim", size=S, dtype="f32", loc="model.pool")
    return toy.b.op("mul", toy.x, toy.b.op("log", size))


def shifted_tokens(toy: Toy) -> Value:
    padded = toy.b.op("concat", toy.x, toy.x, axis=1, loc="model.pool")
    return toy.b.op("slice", padded, axis=1, start=1, stop=S + 1, loc="model.pool")


def token_against_token(toy: Toy) -> Value:
    scores = toy.b.op("matmul", toy.x, toy.b.op("transpose", toy.x, perm=(0, 2, 1)), loc="model.pool")
    return toy.b.op("matmul", scores, toy.x)


def reversed_positions(toy: Toy) -> Value:
    back = toy.b.op("sub", toy.b.op("dim", size=S - 1, loc="model.pool"), toy.pos)
    return toy.b.op("embed", back, weight("positions", 64, WIDTH))


def longer_range(toy: Toy) -> Value:
    shifted = toy.b.op("iota", size=S + 1, loc="model.pool")
    rows = toy.b.op("slice", shifted, axis=0, start=1, stop=S + 1)
    return toy.b.op("embed", toy.b.op("reshape", rows, shape=(1, S)), weight("positions", 64, WIDTH))


def fixed_table_along_tokens(toy: Toy) -> Value:
    narrow = toy.b.op("slice", weight("positions", 40, WIDTH), axis=0, start=0, stop=S - 1, loc="model.pool")
    padded = toy.b.op("concat", narrow, weight("one", 1, WIDTH), axis=0, loc="model.pool")
    return toy.b.op("add", toy.x, padded)


@pytest.mark.parametrize(
    "mix",
    [
        mean_over_tokens, cumsum_over_tokens, softmax_over_tokens, causal_conv, log_length_scale,
        shifted_tokens, token_against_token, reversed_positions, longer_range, fixed_table_along_tokens,
    ],
)  # fmt: skip
def test_an_op_that_mixes_tokens_is_refused_with_its_location(mix: object) -> None:
    toy = Toy()
    graph = toy.graph(toy.attend(mix(toy), 0, CAUSAL))  # type: ignore[operator]
    verify(graph)
    with pytest.raises(PassError, match="model.pool"):
        PageKv().run(graph)


def test_learned_positions_are_rows_of_the_table_at_the_positions() -> None:
    toy = Toy()
    rows = toy.b.op("slice", weight("positions", 64, WIDTH), axis=0, start=2, stop=S + 2)
    graph = toy.graph(toy.attend(toy.b.op("add", toy.x, rows), 0, CAUSAL))
    read = weights(graph)
    selected = SelectRows().run(PageKv().run(graph).graph).graph
    ids = np.random.default_rng().integers(0, VOCAB, 21)
    (got,) = run_paged(selected, read, [ids], 5)
    whole = interpret(graph, {"ids": ids[None], "pos": np.arange(21)[None]}, read, np.float64)
    np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


def test_an_attention_whose_mask_is_not_proved_is_refused() -> None:
    graph = two_layers()
    ops = tuple(replace(op, attrs={"scale": 0.4}) if op.kind == "attention" else op for op in graph.ops)
    with pytest.raises(PassError, match="model.attn0"):
        PageKv().run(replace(graph, ops=ops))


def test_rows_are_chosen_right_after_the_last_attention() -> None:
    selected = SelectRows().run(PageKv().run(two_layers()).graph).graph
    taken = [op.args[0].name for op in selected.ops if op.kind == "take_rows"]  # type: ignore[union-attr]
    assert "o1" in taken
    assert selected.outputs[0].type == Tensor(DType.F32, (symbol("Q"), VOCAB))
    last = max(i for i, op in enumerate(selected.ops) if op.kind == "paged_attention")
    after = [op for op in selected.ops[last + 1 :] if op.kind != "take_rows"]
    assert all(symbol("T") not in o.type.shape for op in after for o in op.outs)  # type: ignore[union-attr]


def test_a_scalar_operand_stays_a_literal() -> None:
    toy = Toy()
    graph = toy.graph(toy.attend(toy.b.op("mul", toy.x, Scalar(2.0), name="twice"), 0, CAUSAL))
    twice = next(op for op in PageKv().run(graph).graph.ops if op.outs[0].name == "twice")
    assert twice.args[1] == Scalar(2.0)


@pytest.mark.parametrize("name", ["lens", "rows", "kv0"])
def test_values_called_as_the_steps_inputs_make_way(name: str) -> None:
    graph = two_layers()
    first = graph.ops[0].outs[0]
    called = {first.name: Value(name, first.type)}
    taken = replace(graph, ops=tuple(op.renamed(called) for op in graph.ops))
    lowered = SelectRows().run(PageKv().run(taken).graph).graph
    verify(lowered)
    assert {"lens", "starts", "rows", "kv0", "kv1"} < {v.name for v in lowered.inputs}


@pytest.mark.parametrize(
    "options", [{"block": 0}, {"block": -1}, {"block": 10**11}, {"dtype": "f99"}, {"dtype": "i8"}]
)
def test_options_that_make_no_cache_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"page_kv: {next(iter(options))} must be"):
        PageKv(**options)
