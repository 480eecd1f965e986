"""In-memory modules and exported programs import to graphs that give torch's own results."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compiler.importers import ImportRefused, load
from ir.predicates import CAUSAL
from tests.importers.compare import TOLERANCE, run, worst
from tests.model import tiny

CONTEXT, VOCAB, HIDDEN, HEADS = 48, 51, 24, 3
LENGTHS = (1, 2, 15, 16, 17, CONTEXT)

Attend = Callable[[nn.Module, Any, Any, Any], Any]  # module, q, k, v [1, H, S, D] -> [1, H, S, D]


def scores_of(q: Any, k: Any) -> Any:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def no_mask_for_one(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    length = q.shape[2]
    scores = scores_of(q, k)
    if length > 1:
        scores = scores + torch.full((length, length), float("-inf")).triu(1)
    return scores.softmax(-1) @ v


def flag_from_length(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def table_mask(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    seen = m.seen[: q.shape[2], : k.shape[2]]
    return scores_of(q, k).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def added_mask(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    length = q.shape[2]
    return (scores_of(q, k) + torch.full((length, length), float("-inf")).triu(1)).softmax(-1) @ v


def einsum(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    length = q.shape[2]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    probs = scores.masked_fill(torch.ones(length, length).tril() == 0, -1e9).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", probs, v)


def flagged(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def scaled(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def grouped(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    call = nn.functional.scaled_dot_product_attention
    return call(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)


def repeated(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
    k, v = (x[:, :1].repeat_interleave(HEADS, dim=1) for x in (k, v))
    return table_mask(m, q, k, v)


ATTENDS: dict[str, Attend] = {
    f.__name__: f
    for f in (
        table_mask,
        added_mask,
        einsum,
        flagged,
        scaled,
        grouped,
        repeated,
        no_mask_for_one,
        flag_from_length,
    )
}


class Layer(nn.Module):
    """Norm, attention, norm, feed-forward, with in-place adds."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.q, self.k = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 40), nn.Linear(40, HIDDEN)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("seen", torch.ones(CONTEXT, CONTEXT).tril().bool(), persistent=False)

    def forward(self, x: Any) -> Any:  # [1, S, HIDDEN]
        h = self.first(x)
        q, k, v = (
            f(h).view(*h.shape[:2], HEADS, HIDDEN // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        x = x + self.drop(self.o(self.attend(self, q, k, v).transpose(1, 2).flatten(2)))
        h = self.down(nn.functional.leaky_relu(self.up(self.second(x))))
        h += x
        return h


class Model(nn.Module):
    """Learned positions, two layers, a tied head."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(attend: Attend) -> Model:
    torch.manual_seed(0)
    return Model(attend).eval()


@pytest.mark.parametrize("name", ATTENDS)
def test_logits_are_the_modules(name: str) -> None:
    model = made(ATTENDS[name])
    imported = load(model, max_context=CONTEXT)
    errors = {length: worst(imported, model, length, VOCAB) for length in LENGTHS}
    assert max(errors.values()) <= TOLERANCE, errors


def test_a_plain_model_stays_plain_ops_for_the_pattern_to_match() -> None:
    model = tiny.build_plain()
    imported = load(model, max_context=tiny.CONTEXT)
    kinds = [op.kind for op in imported.graph.ops]
    assert kinds.count("attention") == 0 and kinds.count("softmax") == 2 and kinds.count("matmul") == 4
    assert worst(imported, model, 33, tiny.VOCAB) <= TOLERANCE


def test_scaled_dot_product_attention_is_the_attention_op() -> None:
    imported = load(made(flagged), max_context=CONTEXT)
    found = [op for op in imported.graph.ops if op.kind == "attention"]
    assert len(found) == 2
    assert all(op.attr("mask") == CAUSAL and len(op.args) == 3 for op in found)
    assert [op.attr("scale") for op in found] == [(HIDDEN // HEADS) ** -0.5] * 2
    assert [op.loc for op in found] == ["layers.0", "layers.1"]
    explicit = [op for op in load(made(scaled), max_context=CONTEXT).graph.ops if op.kind == "attention"]
    assert all(op.attr("mask") is None and op.args[3] is not None for op in explicit)


def test_tied_weights_are_one_array() -> None:
    imported = load(made(flagged), max_context=CONTEXT)
    names = [w.name for w in imported.graph.weights]
    assert "tokens.weight" in names and "head.weight" not in names


def test_multihead_attention_of_torch() -> None:
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
            self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids)
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            for need_weights in (False, True):
                x = x + self.attention(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
            return (self.head(x),)

    torch.manual_seed(0)
    model = Torch().eval()
    imported = load(model, max_context=CONTEXT)
    plain = lambda ids: model(ids)[0]  # noqa: E731
    assert max(worst(imported, plain, length, VOCAB) for length in LENGTHS) <= TOLERANCE


def test_positions_are_given_where_forward_takes_them() -> None:
    class Positioned(Model):
        def forward(self, ids: Any, position_ids: Any = None) -> Any:
            x = self.tokens(ids) + self.positions(position_ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Positioned(flagged).eval()
    imported = load(model, max_context=CONTEXT)
    given = lambda ids: model(ids, torch.arange(ids.shape[1])[None])  # noqa: E731
    assert max(worst(imported, given, length, VOCAB) for length in LENGTHS) <= TOLERANCE
    assert any(v.name == "pos" for op in imported.graph.ops for v in op.values)


def test_an_exported_program() -> None:
    model = made(flagged)
    length = torch.export.Dim("length", min=2, max=CONTEXT)
    example = (torch.zeros((1, 9), dtype=torch.long),)
    program = torch.export.export(model, example, dynamic_shapes=({1: length},))
    imported = load(program)
    assert imported.info.max_context == CONTEXT and imported.info.vocab_size == VOCAB
    assert max(worst(imported, model, n, VOCAB) for n in LENGTHS) <= TOLERANCE


def test_graph_modules_with_their_weights_inside() -> None:
    model = made(flagged)
    length = torch.export.Dim("length", min=2, max=CONTEXT)
    program = torch.export.export(
        model, (torch.zeros((1, 9), dtype=torch.long),), dynamic_shapes=({1: length},)
    )
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    imported = load(module, max_context=CONTEXT)
    assert max(worst(imported, model, n, VOCAB) for n in LENGTHS[2:4]) <= TOLERANCE
    with pytest.raises(
        ImportRefused, match="a graph without its weights.*the exported program that it is of"
    ):
        load(program.graph_module, max_context=CONTEXT)


@pytest.mark.parametrize("kept", [True, False], ids=["buffer", "made in forward"])
def test_rotations_written_with_complex_numbers(kept: bool) -> None:
    size = HIDDEN // HEADS
    frequencies = 1.0 / 100.0 ** (torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(CONTEXT), frequencies)

    def rotated(m: nn.Module, x: Any) -> Any:  # [1, H, S, D]
        made = angles[: x.shape[2]].to(x.device)
        turn = m.turn[: x.shape[2]] if kept else torch.polar(torch.ones_like(made), made)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn[None, None]).flatten(3)

    def attend(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
        return flagged(m, rotated(m, q), rotated(m, k), v)

    model = made(attend)
    for layer in model.layers:
        layer.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)
    imported = load(model, max_context=CONTEXT)
    assert max(worst(imported, model, length, VOCAB) for length in LENGTHS) <= TOLERANCE
    assert [op.kind for op in imported.graph.ops].count("attention") == 2


def test_complex_numbers_without_a_converter_are_refused() -> None:
    def attend(m: nn.Module, q: Any, k: Any, v: Any) -> Any:
        return flagged(m, torch.complex(q, q).abs(), k, v)

    with pytest.raises(ImportRefused, match="abs.*layers.0.*no converter for complex numbers"):
        load(made(attend), max_context=CONTEXT)


def test_the_modules_mode_is_left_as_it_was() -> None:
    model = made(flagged).train()
    load(model, max_context=CONTEXT)
    assert model.training and all(m.training for m in model.modules())


class Masked(nn.Module):
    """A model whose forward needs a padding mask, positions and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Any, keep: Any, where: Any, scale: float, *, doubled: bool) -> Any:
        x = self.embed(tokens) + self.places(where)
        scores = x @ x.transpose(-1, -2)
        seen = torch.ones_like(scores, dtype=torch.bool).tril() & keep[:, None, :].bool()
        x = scores.masked_fill(~seen, -1e9).softmax(-1) @ x
        return (self.head(x) * scale * (2 if doubled else 1),)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_an_example_tells_what_arguments_are(by_keyword: bool) -> None:
    torch.manual_seed(0)
    model, ids = Masked().eval(), torch.randint(1, VOCAB, (2, 7))
    given: Any = dict(
        where=torch.arange(7).expand(2, 7), keep=torch.ones(2, 7), tokens=ids, scale=0.5, doubled=True
    )
    if not by_keyword:
        model.forward = partial(model.forward, doubled=True)  # type: ignore[method-assign]
        given = (ids, torch.ones(2, 7, dtype=torch.long), torch.arange(7).expand(2, 7), 0.5)
    imported = load(model, max_context=CONTEXT, example_inputs=given)
    for length in LENGTHS:
        tokens = np.random.default_rng(length).integers(0, VOCAB, (1, length))
        call = (torch.tensor(tokens), torch.ones(1, length), torch.arange(length)[None], 0.5)
        with torch.no_grad():
            expected = model(*call, doubled=True)[0].numpy()
        assert np.abs(run(imported, tokens) - expected).max() <= TOLERANCE * expected.std()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((torch.ones(2, 7), 3), "no token ids"),
        ((torch.zeros(2, 7, dtype=torch.long), torch.rand(2, 7)), "'keep' is neither ids"),
        ((torch.zeros(2, 7, dtype=torch.long), *[torch.arange(7).expand(2, 7)] * 2), "several of them"),
    ],
)
def test_examples_that_say_too_little_are_refused(given: Any, what: str) -> None:
    with pytest.raises(ImportRefused, match=what):
        load(Masked(), max_context=CONTEXT, example_inputs=given)


def test_a_file_and_a_traced_program_need_no_example(tmp_path: Path) -> None:
    for source in (tmp_path, torch.export.export(nn.Embedding(3, 3), (torch.zeros(1, 2, dtype=torch.long),))):
        with pytest.raises(ImportRefused, match="example_inputs"):
            load(source, max_context=CONTEXT, example_inputs=(torch.zeros(1, 2, dtype=torch.long),))
