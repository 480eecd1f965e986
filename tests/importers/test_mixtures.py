"""Mixtures of experts as people write them in plain torch: imported, and the experts that are chosen computed
alone, they give the module's logits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compiler.errors import CompileError
from compiler.importers import load
from compiler.pipeline import pipeline
from ir.graph import Graph
from tests.importers.compare import TOLERANCE, worst

VOCAB, CONTEXT, H, INNER, E, K = 61, 64, 32, 24, 5, 2
Tensor = torch.Tensor


class Expert(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, INNER, bias=bias), nn.Linear(H, INNER, bias=bias)
        self.down = nn.Linear(INNER, H, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and indices [B,S,K], and all scores."""
        scores = F.softmax(self.router(x), -1)
        weights, indices = torch.topk(scores, K, -1)
        return weights / weights.sum(-1, keepdim=True), indices, scores

    def all(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts], -2)


class Masks(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + (weights * (indices == e)).sum(-1, keepdim=True) * expert(x)
        return out


class Biased(Masks):
    def __init__(self) -> None:
        super().__init__(bias=True)


class Where(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            share = torch.where(indices == e, weights, torch.zeros_like(weights)).sum(-1, keepdim=True)
            chosen = (indices == e).any(-1, keepdim=True)
            out = out + torch.where(chosen, share * expert(x), torch.zeros_like(x))
        return out


class Scattered(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, indices, scores = self.route(x)
        shares = torch.zeros_like(scores).scatter(-1, indices, weights)
        return x + sum(shares[..., e].unsqueeze(-1) * expert(x) for e, expert in enumerate(self.experts))


class OneHot(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.route(x)
        shares = (F.one_hot(indices, E).to(x.dtype) * weights.unsqueeze(-1)).sum(-2)
        return torch.einsum("bse,bseh->bsh", shares, self.all(x))


class Masked(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        _, indices, scores = self.route(x)
        shares = scores * F.one_hot(indices, E).sum(-2).to(x.dtype)
        shares = shares / shares.sum(-1, keepdim=True)
        return (shares.unsqueeze(-1) * self.all(x)).sum(-2)


class Gathered(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.route(x)
        picked = torch.gather(self.all(x), -2, indices.unsqueeze(-1).expand(*indices.shape, H))
        return (picked * weights.unsqueeze(-1)).sum(-2)


class Slots(Mixture):
    """Each slot of a token by itself."""

    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = expert(x)
            for j in range(K):
                out = out + weights[..., j : j + 1] * (indices[..., j : j + 1] == e) * y
        return out


class Stacked(nn.Module):
    """Experts whose matrices are stacked, [E,in,out]."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(E, H, INNER) * 0.2) for _ in range(2))
        self.down = nn.Parameter(torch.randn(E, INNER, H) * 0.2)


class Einsum(Stacked):
    def forward(self, x: Tensor) -> Tensor:
        scores = F.softmax(self.router(x), -1)
        weights, indices = torch.topk(scores, K, -1)
        shares = torch.zeros_like(scores).scatter(-1, indices, weights)
        inner = F.gelu(torch.einsum("bsh,ehi->bsei", x, self.gate)) * torch.einsum(
            "bsh,ehi->bsei", x, self.up
        )
        return torch.einsum("bse,bseh->bsh", shares, torch.einsum("bsei,eih->bseh", inner, self.down))


class Rows(Stacked):
    """All experts' rows as one axis, each times its share before the first product."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, H)
        scores = self.router(rows)
        top, indices = torch.topk(scores, K, 1)
        shares = torch.full_like(scores, float("-inf")).scatter(1, indices, top).sigmoid()
        scaled = (rows.repeat(E, 1) * shares.transpose(0, 1).reshape(-1, 1)).view(E, -1, H)
        inner = F.silu(torch.bmm(scaled, self.gate)) * torch.bmm(scaled, self.up)
        each = torch.bmm(inner, self.down).view(-1, H).reshape(E, -1, H)
        return x + each.sum(0).view(x.shape)


class Indexed(Mixture):
    """The rows of each expert picked by a condition: how many there are depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        weights, indices, _ = self.route(x)
        rows, out = x.reshape(-1, H), torch.zeros_like(x).reshape(-1, H)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(indices.reshape(-1, K) == e)
            out.index_add_(0, token, expert(rows[token]) * weights.reshape(-1, K)[token, slot, None])
        return out.reshape(x.shape)


class Model(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, H), nn.Linear(H, VOCAB, bias=False)
        self.qkv, self.moe = nn.Linear(H, 3 * H), mixture

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (t.view(*ids.shape, 2, H // 2).transpose(1, 2) for t in self.qkv(x).split(H, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return self.head(x + self.moe(x))


FORMS = (Masks, Biased, Where, Scattered, OneHot, Masked, Gathered, Slots, Einsum, Rows)


def before_paging(graph: Graph) -> Graph:
    """As the pipeline has it once experts are looked for."""
    for step in pipeline():
        graph = step.run(graph).graph
        if step.name == "merge_linears":
            break
    return graph


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_experts_that_are_not_chosen_are_not_computed(form: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Model(form()).eval()
    imported = load(model, max_context=CONTEXT)
    graph = before_paging(imported.graph)
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("moe_linear") == (4 if form is Slots else 2)  # gate and up are one
    assert kinds.count("linear") == 3  # attention's, the router and the head
    for length in (1, 5, 17):
        assert worst(replace(imported, graph=graph), model, length, VOCAB) <= TOLERANCE
    other = Model(form()).eval()  # the comparison sees what is computed
    assert worst(replace(imported, graph=graph), other, 17, VOCAB) > 0.1


def test_rows_that_are_picked_by_a_condition_are_refused_where_they_are() -> None:
    with pytest.raises(CompileError) as refused:
        load(Model(Indexed()).eval(), max_context=CONTEXT)
    assert "aten.nonzero" in str(refused.value) and "in moe (" in str(refused.value)
