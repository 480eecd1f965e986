"""What routers are written in (top-k, gather, scatter, one-hot, sort) imports to torch's own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compiler.importers import load
from compiler.importers.refused import ImportRefused
from tests.importers.compare import TOLERANCE, run, worst

VOCAB, WIDTH, CONTEXT = 37, 13, 64


class Routed(nn.Module):
    """Logits that `fn` makes of random rows [1,S,V]; no two elements of a row are equal."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, VOCAB)
        self.fn = fn

    def forward(self, ids: Any) -> Any:
        return self.fn(self.embed(ids))


def filled(x: Any, index: Any, source: Any) -> Any:
    """As routers of top-k scores among others that do not count write it."""
    return torch.full_like(x, float("-inf")).scatter_(-1, index, source).sigmoid() + x


def group_limited(x: Any) -> Any:
    """Experts of the best groups alone, a group's score being the sum of its two best."""
    scores = x[..., :36].sigmoid()
    groups = scores.view(1, -1, 4, 9).topk(2, dim=-1)[0].sum(-1)
    best = groups.topk(2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(-1, best, 1)
    kept = scores.masked_fill(~mask.unsqueeze(-1).expand(-1, -1, 4, 9).reshape(scores.shape).bool(), 0.0)
    chosen = kept.topk(5, dim=-1)[1]
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(x).scatter(-1, chosen, weights)


FORMS: dict[str, Callable[[Any], Any]] = {
    "top-k along the last axis": lambda x: x + x.topk(3)[0].sum(-1, keepdim=True),
    "top-k along another axis": lambda x: x + x.view(1, -1, VOCAB, 1).topk(5, dim=2)[0].sum(2),
    "indices of the top-k": lambda x: x + x.topk(4, sorted=False)[1].float().sum(-1, keepdim=True),
    "gather": lambda x: x + x.gather(-1, (x * 7).long().abs() % 5),
    "gather of fewer rows": lambda x: x + x.view(1, -1, 1, VOCAB).expand(-1, -1, 3, -1).gather(
        -1, x.topk(2)[1].unsqueeze(2))[..., 0, :1],
    "gather along another axis": lambda x: x + x[..., None].gather(2, x.topk(VOCAB)[1][..., None])[..., 0],
    "scatter of a number": lambda x: x.scatter(-1, x.topk(3)[1], 2.5),
    "scatter of sources": lambda x: filled(x, x.topk(3)[1], -x.topk(3)[0]),
    "scatter of one source": lambda x: filled(x, x.topk(1)[1], x.topk(1)[0]),
    "scatter of infinities": lambda x: x.scatter(
        -1, x.topk(2)[1], torch.full_like(x, float("inf"))).sigmoid(),
    "scatter of integers": lambda x: x + x.topk(3)[1].new_zeros(x.shape).scatter(
        -1, x.topk(3)[1], x.topk(3)[1] - 20),
    "scatter along another axis": lambda x: x + torch.zeros_like(x).unsqueeze(-1).scatter(
        2, x.topk(3)[1].unsqueeze(-1), 1.0)[..., 0],
    "scatter that adds": lambda x: x.scatter_add(-1, (x * 3).long().abs() % 4, x),
    "one-hot": lambda x: x + nn.functional.one_hot(x.topk(2)[1], VOCAB).sum(2),
    "sorted, falling": lambda x: x.sort(dim=-1, descending=True)[0] + x.argsort(-1, descending=True).float(),
    "group-limited": group_limited,
    "log1p": lambda x: torch.log1p(x.abs()) + 1e6 * torch.log1p(x * 1e-7),
    "log1p at its ends": lambda x: torch.exp(-torch.log1p(torch.where(x > 0, float("inf"), x.abs() * 0)))
    + torch.exp(torch.log1p(-1 + x * 0)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    model = Routed(FORMS[form]).eval()
    imported = load(model, max_context=CONTEXT)
    assert max(worst(imported, model, n, VOCAB) for n in (1, 2, 17, 33)) <= TOLERANCE


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x.topk(3, largest=False)[0].sum(-1, keepdim=True) + x, "Take the largest of the negated"),
        (lambda x: x.sort(dim=-1)[0], "Sort in falling order"),
        (lambda x: x.scatter(1, x.topk(1)[1], 2.0), "Scatter into all rows"),
    ],
)
def test_refuses(fn: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        load(Routed(fn).eval(), max_context=CONTEXT)


def test_equal_scores_go_to_the_lowest_index() -> None:
    model = Routed(lambda x: x * 0 + nn.functional.one_hot((x * 0).topk(3)[1], VOCAB).sum(2)).eval()
    imported = load(model, max_context=CONTEXT)
    found = run(imported, np.arange(16)[None] % VOCAB)
    assert (found[0, :, :3] == 1).all() and (found[0, :, 3:] == 0).all()
