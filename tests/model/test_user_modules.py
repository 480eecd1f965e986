"""Attention as people write it in their own modules, compiled and run, gives eager torch's logits; what looks
ahead or mixes tokens is refused where it is.

Sequences of 1, 15, 16, 17 and 70 tokens run alone, together in one step, and together in chunks under a
budget of 16 tokens: each within 1e-4 of the standard deviation of torch's logits at every position, and all
three to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

import compiler
from compiler.errors import CompileError
from tests.model import tiny
from tests.model.harness import Stepper

LENGTHS = (1, 15, 16, 17, 70)
BUDGET = 16
HIDDEN, HEADS, SIZE = 96, 3, 32
CONTEXT, VOCAB = tiny.CONTEXT, tiny.VOCAB
TOLERANCE = 1e-4

sdpa = nn.functional.scaled_dot_product_attention
Attend = Callable[[Any, Any, Any, Any], Any]  # module, q, k, v [B, H, S, D] -> [B, H, S, D]
Scores = Callable[[Any, Any], Any]  # module, scores [B, H, S, S] -> masked scores


class Attention(nn.Module):
    """Buffers: a random mask that never looks ahead, as flags and as 0 and -inf, and one that does."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        any_key = torch.rand(CONTEXT, CONTEXT, generator=torch.Generator().manual_seed(3)) < 0.5
        any_key.fill_diagonal_(True)
        self.register_buffer("any_key", any_key)
        self.register_buffer("earlier", any_key.tril())
        self.register_buffer("added", torch.zeros(CONTEXT, CONTEXT).masked_fill(~any_key.tril(), -math.inf))
        away = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
        self.register_buffer("decays", (torch.tensor([0.9, 0.95, 0.99])[:, None, None] ** away.abs()).tril())
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]))
        self.sinks = nn.Parameter(torch.tensor([0.3, -0.7, 1.1]))
        self.rel, self.row = nn.Embedding(32, HEADS), nn.Parameter(torch.randn(HEADS, CONTEXT))
        self.rates, self.powers = nn.Parameter(torch.rand(HEADS) + 0.5), nn.Parameter(torch.rand(HEADS) + 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, SIZE).transpose(1, 2)
            for part in self.qkv(x).split(HIDDEN, dim=-1)
        )
        return self.out(self.attend(self, q, k, v).transpose(1, 2).reshape(batch, length, HIDDEN))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


class EinsumAttention(nn.Module):
    """Projections, scores and sums all as einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HIDDEN, HEADS, SIZE) / HIDDEN**0.5)
        self.out = nn.Parameter(torch.randn(HEADS, SIZE, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.einsum("bsc,chd->bshd", x, w) for w in self.qkv)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE)
        attended = torch.einsum("bhqk,bkhd->bqhd", fill(self, scores).softmax(-1), v)
        return torch.einsum("bqhd,hdc->bqc", attended, self.out)


class InTurn(nn.Module):
    """Attention of several forms, a layer each: one compile for all of them."""

    def __init__(self, attends: Sequence[Attend]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Attention, attends))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Model(nn.Module):
    """Embeddings, a mixer, attention, a feed-forward and a head."""

    def __init__(self, attention: nn.Module, mix: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.mix, self.attention, self.norm = mix or nn.Identity(), attention, nn.LayerNorm(HIDDEN)
        self.up, self.down, self.head = (
            nn.Linear(HIDDEN, 128), nn.Linear(128, HIDDEN), nn.Linear(HIDDEN, VOCAB),
        )  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # [B, S] -> [B, S, V]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.mix(x)
        x = x + self.attention(x)
        return self.head(x + self.down(nn.functional.silu(self.up(self.norm(x)))))


def made(attention: nn.Module, mix: nn.Module | None = None) -> Model:
    torch.manual_seed(0)
    return Model(attention, mix).eval()


def masked(change: Scores) -> Attend:
    """Attention written out: matmul, a mask, softmax, matmul."""

    def attend(m: Any, q: Any, k: Any, v: Any) -> Any:
        return change(m, q @ k.transpose(-2, -1) / math.sqrt(SIZE)).softmax(-1) @ v

    attend.__name__ = change.__name__
    return attend


def qk(x: Any) -> tuple[Any, Any]:
    """Positions of queries [S, 1] and keys [1, S]."""
    at = torch.arange(x.shape[-2], device=x.device)
    return at[:, None], at[None, :]


def fill(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill(k > q, -math.inf)


def fill_lowest(m: Any, s: Any) -> Any:
    return s.masked_fill(torch.ones_like(s[0, 0]).tril() == 0, torch.finfo(s.dtype).min)


def choose(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return torch.where(k <= q, s, torch.tensor(torch.finfo(s.dtype).min, device=s.device))


def add_triangle(m: Any, s: Any) -> Any:
    return s + torch.full(s.shape[-2:], -math.inf, device=s.device).triu(1)


def positions_only(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill(~(((q * 7 + k * 3) % 5 != 0) & (k < q) | (q == k)), -math.inf)


def flags(m: Any, s: Any) -> Any:
    size = s.shape[-1]
    return s.masked_fill(~m.earlier[:size, :size], -math.inf)


def added(m: Any, s: Any) -> Any:
    size = s.shape[-1]
    return s + m.added[:size, :size]


def indexed(m: Any, s: Any) -> Any:
    pos = torch.arange(s.shape[-1], device=s.device)
    return s.masked_fill(~m.earlier[pos[:, None], pos[None]], -math.inf)


def chunked(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill((k > q) | (q // 11 != k // 11), -math.inf)


def window(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill((k > q) | (q - k >= 9), -1e9)


def window_and_first(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill(~((k <= q) & ((q - k < 9) | (k < 4))), -math.inf)


def wider_window_and_first(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill(~((k <= q) & ((q - k < 10) | (k < 4))), -math.inf)


def alibi(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return (s + m.slopes[:, None, None] * (k - q)).masked_fill(k > q, -math.inf)


def buckets(m: Any, s: Any) -> Any:
    """T5's, as transformers computes them."""
    q, k = qk(s)
    bucket = T5Attention._relative_position_bucket(
        k - q, bidirectional=False, num_buckets=32, max_distance=50
    )
    return fill(m, s + m.rel(bucket).permute([2, 0, 1]).unsqueeze(0))


def clamped(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return fill(m, s + m.rel((q - k).clamp(0, 20)).permute(2, 0, 1))


def by_row(m: Any, s: Any) -> Any:
    """A number for each distance below the context, over keys of a window."""
    q, k = qk(s)
    return (s + m.row[:, (q - k).abs()]).masked_fill((k > q) | (q - k >= 40), -math.inf)


def kerple(m: Any, s: Any) -> Any:
    """arXiv 2205.09921: logarithms and powers of distances, both with learned numbers for each head."""
    q, k = qk(s)
    d = (q - k).abs()
    logs = -m.rates[:, None, None] * torch.log(1 + m.powers[:, None, None] * d)
    return fill(m, s + logs - m.rates[:, None, None] * d.float() ** m.powers[:, None, None])


def clipped_alibi(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return fill(m, s + m.slopes[:, None, None] * (k - q).clamp(min=-12) + m.slopes[:, None, None] * (k - q))


def bias_in_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    at = torch.arange(q.shape[2], device=q.device)
    d = at[:, None] - at
    bias = m.rel(d.clamp(0, 31)).permute(2, 0, 1)[None]
    return sdpa(q, k, v, attn_mask=bias.masked_fill(d < 0, torch.finfo(q.dtype).min))


def sinks(m: Any, q: Any, k: Any, v: Any) -> Any:
    s = fill(m, q @ k.transpose(-2, -1) / math.sqrt(SIZE))
    extra = m.sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[2], 1)
    return torch.cat([s, extra], dim=-1).softmax(-1)[..., :-1] @ v


def flagged(m: Any, q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k, v, is_causal=True)


def grouped(m: Any, q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True)


def bool_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    size = q.shape[2]
    return sdpa(q, k, v, attn_mask=m.earlier[:size, :size])


def float_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    size = q.shape[2]
    return sdpa(q, k, v, attn_mask=m.added[:size, :size], scale=0.25)


def before(x: Any) -> Any:
    """Of the token before, by a pad and a cut."""
    return nn.functional.pad(x, (0, 0, 1, 0))[..., :-1, :]


def values_half_of_the_token_before(m: Any, q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k, 0.5 * v + 0.5 * before(v), is_causal=True)


def some_channels_moved(m: Any, q: Any, k: Any, v: Any) -> Any:
    left, right = v.chunk(2, -1)
    moved = nn.functional.pad(right.transpose(-2, -1), (2, 0))[..., :-2]
    return sdpa(q, k, torch.cat([left, moved.transpose(-2, -1)], -1), is_causal=True)


def smeared_keys(m: Any, q: Any, k: Any, v: Any) -> Any:
    share = q[..., :1].sigmoid()
    rest = (1 - share[:, :, 1:]) * k[:, :, :-1] + share[:, :, 1:] * k[:, :, 1:]
    return sdpa(q, torch.cat([k[:, :, :1], rest], 2), v, is_causal=True)


def keys_rolled(m: Any, q: Any, k: Any, v: Any) -> Any:
    k = k.roll(1, 2)
    k[:, :, 0] = m.sinks[:, None]
    return sdpa(q, k, v, is_causal=True)


def by_head(x: Any) -> Any:
    return x[:, None, None]


def of_the_token(x: Any) -> Any:
    return x[..., :1].sigmoid()


def differential(m: Any, q: Any, k: Any, v: Any) -> Any:
    """As arXiv 2410.05258 has it."""
    batch, heads, length, size = q.shape
    q, k = (
        t.transpose(1, 2).reshape(batch, length, 2 * heads, size // 2).transpose(1, 2) for t in (q, k)
    )  # fmt: skip
    scores = torch.nan_to_num(q @ k.transpose(-1, -2) * (size // 2) ** -0.5)
    scores += torch.triu(torch.zeros([length, length]).float().fill_(-math.inf).type_as(scores), 1)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
    weights = weights.view(batch, heads, 2, length, length)
    share = torch.exp((m.slopes * m.sinks).sum()) - torch.exp(m.sinks.sum() / 4) + 0.8
    return (weights[:, :, 0] - share * weights[:, :, 1]) @ v


def halves(m: Any, q: Any, k: Any) -> tuple[Any, Any]:
    """Probabilities of the first and of the second half of queries and keys."""
    return tuple(fill(m, a @ b.transpose(-2, -1) / 4).softmax(-1)
                 for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True))  # type: ignore[return-value] # fmt: skip


def less_by_head_and_token(m: Any, q: Any, k: Any, v: Any) -> Any:
    first, second = halves(m, q, k)
    return (first * of_the_token(v) - by_head(m.slopes) * second / 2) @ v


def scaled_after(m: Any, q: Any, k: Any, v: Any) -> Any:
    p = fill(m, q @ k.transpose(-2, -1) / 6).softmax(-1)
    flat = (p * by_head(m.sinks) * of_the_token(q)).flatten(0, 1)
    return (flat @ v.flatten(0, 1)).view(v.shape)


def by_temperature(m: Any, q: Any, k: Any, v: Any) -> Any:
    scores = (q @ k.transpose(-2, -1)) / 6 * by_head(m.slopes) / of_the_token(q)
    return fill(m, scores * of_the_token(k).transpose(-2, -1)).softmax(-1) @ v


def two_products(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Content, and one head of keys for all besides."""
    scores = (q @ k.transpose(-2, -1)) / 6 - 0.25 * (q[..., :8] @ v[:, :1, :, :8].transpose(-2, -1))
    return fill(m, scores).softmax(-1) @ v


def of_one_head(m: Any, q: Any, k: Any, v: Any) -> Any:
    k, v = k[:, 0], v[:, 0]
    scores = torch.einsum("bhid,bjd->bhij", q, k) / 6
    return torch.einsum("bhij,bjd->bhid", fill(m, scores).softmax(-1), v)


def with_column_of_zeros(m: Any, q: Any, k: Any, v: Any) -> Any:
    scores = fill(m, q @ k.transpose(-2, -1) / 6)
    return nn.functional.pad(scores, (1, 0)).softmax(-1)[..., 1:] @ v


def one_more(m: Any, q: Any, k: Any, v: Any) -> Any:
    e = fill(m, q @ k.transpose(-2, -1) / 6).exp()
    return e / (1 + e.sum(-1, keepdim=True)) @ v


def divided_last(m: Any, q: Any, k: Any, v: Any) -> Any:
    e = fill(m, q @ k.transpose(-2, -1) / 6).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


FORMS: dict[str, Sequence[Attend]] = {
    "of the tokens before": [
        values_half_of_the_token_before,
        some_channels_moved,
        smeared_keys,
        keys_rolled,
    ],
    "sums of attentions": [differential, less_by_head_and_token, scaled_after],
    "scaled and added scores": [by_temperature, two_products, of_one_head],
    "sums of exponentials": [with_column_of_zeros, one_more, divided_last],
    "causal": [masked(f) for f in (fill, fill_lowest, choose, add_triangle)],
    "by position": [masked(f) for f in (positions_only, chunked, window, window_and_first)],
    "by buffer": [masked(f) for f in (flags, added, indexed, alibi)],
    "by distance": [*map(masked, (buckets, clamped, by_row, kerple, clipped_alibi)), bias_in_mask],
    "torch's own": [flagged, grouped, bool_mask, float_mask, sinks],
}


def rolling_steps(budget: int) -> list[list[tuple[int, int, int]]]:
    """Chunks (request, first, last) that share each step's budget among all requests, one request at a
    time."""
    steps: list[list[tuple[int, int, int]]] = [[]]
    for request, length in enumerate(LENGTHS):
        done = 0
        while done < length:
            room = budget - sum(hi - lo for _, lo, hi in steps[-1])
            if room == 0 or any(r == request for r, _, _ in steps[-1]):
                steps.append([])
                continue
            count = min(room, length - done, 7)
            steps[-1].append((request, done, done + count))
            done += count
    return steps


def check(model: nn.Module, out: Path, reference: nn.Module | None = None) -> None:
    tiny.compiled(model, out)
    stepper = Stepper(out, CONTEXT)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in LENGTHS]
    together = stepper.batch(prompts, [[(r, 0, n) for r, n in enumerate(LENGTHS)]])
    in_chunks = stepper.batch(prompts, rolling_steps(BUDGET))
    for ids, batched, cut in zip(prompts, together, in_chunks, strict=True):
        expected = tiny.reference_logits(reference or model, ids).numpy()
        alone = stepper.logits(ids)
        assert np.abs(alone - expected).max() < TOLERANCE * expected.std(), len(ids)
        assert np.array_equal(alone, batched) and np.array_equal(alone, cut), len(ids)


@pytest.mark.parametrize("forms", FORMS)
def test_logits_are_eager_torchs(forms: str, tmp_path: Path) -> None:
    check(made(InTurn(FORMS[forms])), tmp_path / "m.octavo")


def test_one_wrong_mask_among_several_is_noticed(tmp_path: Path) -> None:
    """The comparison can fail: the compiled model looks one key further back, in one layer of four."""
    first, last = FORMS["by position"][:-1], masked(wider_window_and_first)
    found: list[Model] = []
    for forms in ([*first, last], FORMS["by position"]):
        torch.manual_seed(1)  # equal weights
        found.append(made(InTurn(forms)))
    with pytest.raises(AssertionError, match=r"^15\b"):
        check(found[0], tmp_path / "m.octavo", found[1])


def test_logits_of_torchs_own_attention_module(tmp_path: Path) -> None:
    check(made(TorchAttention()), tmp_path / "m.octavo")


def test_logits_of_einsums(tmp_path: Path) -> None:
    check(made(EinsumAttention()), tmp_path / "m.octavo")


def linear(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Without softmax, over the tokens so far by their count."""
    count = torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]
    return (q @ k.transpose(-1, -2) * causal(q)) @ v / (count * math.sqrt(SIZE))


def causal(q: Any) -> Any:
    return torch.ones(q.shape[2], q.shape[2], device=q.device).tril()


def of_products(m: Any, q: Any, k: Any, v: Any) -> Any:
    return (q @ k.transpose(-2, -1)).tril() @ v / 50


def elu(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Katharopoulos et al., Transformers are RNNs (2020)."""
    q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
    scores = q @ k.transpose(-1, -2) * causal(q)
    return scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)


def state_of_every_token(m: Any, q: Any, k: Any, v: Any) -> Any:
    """The same with the states of all tokens, as a running sum."""
    q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
    states = (k[..., :, None] * v[..., None, :]).cumsum(2)
    return (q[..., None, :] @ states)[..., 0, :] / (q * k.cumsum(2)).sum(-1, keepdim=True)


def retention(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Sun et al., Retentive Network (2023): scores fall off with the distance, at a rate of each head."""
    at = torch.arange(q.shape[2], device=q.device)
    decay = 1 - 2.0 ** (-5 - torch.arange(HEADS, device=q.device))
    lower = torch.where(at[:, None] >= at, decay[:, None, None] ** (at[:, None] - at), 0.0)
    return (q @ k.transpose(-1, -2) / math.sqrt(SIZE) * lower) @ v


def kept(v: Any) -> Any:
    """[B, H, S]: logs of how much of all before each token keeps, summed up to it."""
    return nn.functional.logsigmoid(v.sum(-1) + 2).cumsum(-1)


def forgetting(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Lin et al., Forgetting Transformer (2025): softmax of scores less what was forgotten between."""
    total = kept(v)
    scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE) + total[..., None] - total[..., None, :]
    return fill(m, scores).softmax(-1) @ v


def gated_linear(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Without softmax, scores less what was forgotten between."""
    total = kept(v)
    between = fill(m, total[..., None] - total[..., None, :]).exp()
    return (q @ k.transpose(-1, -2) / SIZE * between) @ v


def rates(q: Any) -> Any:
    return 1 - 2.0 ** (-5 - torch.arange(HEADS, device=q.device))


def distances(q: Any) -> Any:
    at = torch.arange(q.shape[2], device=q.device)
    return at[:, None] - at


def retention_by_buffer(m: Any, q: Any, k: Any, v: Any) -> Any:
    size = q.shape[2]
    return (q @ k.transpose(-1, -2) * m.decays[:, :size, :size]) @ v / SIZE


def retention_of_a_stack(m: Any, q: Any, k: Any, v: Any) -> Any:
    d = distances(q).clamp(min=0)
    decays = torch.stack([torch.tensor(rate).pow(d).tril() for rate in (0.9, 0.95, 0.99)])
    return torch.einsum("bhij,bhjd->bhid", q @ k.transpose(-1, -2) / SIZE * decays, v)


def retention_without_what_is_no_number(m: Any, q: Any, k: Any, v: Any) -> Any:
    d = distances(q)
    exponent = d.float().masked_fill(d < 0, math.inf) * rates(q).log()[:, None, None]
    decays = torch.nan_to_num(exponent.exp())
    decays[decays != decays] = 0
    return (q @ k.transpose(-1, -2) / SIZE * decays) @ v


def retention_by_the_sum_of_decays(m: Any, q: Any, k: Any, v: Any) -> Any:
    decays = torch.where(distances(q) >= 0, m.slopes[:, None, None].sigmoid() ** distances(q), 0.0)
    scores = q.sigmoid() @ k.sigmoid().transpose(-1, -2) * decays / decays.sum(-1, keepdim=True)
    return scores @ v / (scores.sum(-1, keepdim=True) + 1)


def mean_by_matrix(m: Any, q: Any, k: Any, v: Any) -> Any:
    weights = causal(q)
    return q.tanh() * (weights / weights.sum(-1, keepdim=True) @ v)


def mean_of_the_recent(m: Any, q: Any, k: Any, v: Any) -> Any:
    return (fill(m, -0.1 * distances(q).float()[None, None])).softmax(-1)[0, 0] @ v


def average_by_head(m: Any, q: Any, k: Any, v: Any) -> Any:
    size = q.shape[2]
    return torch.einsum("hij,bhjd->bhid", m.decays[[2, 0, 1], :size, :size], v) / 8


def average_from_the_right(m: Any, q: Any, k: Any, v: Any) -> Any:
    """The same as x^T times a matrix."""
    size = q.shape[2]
    return (v.mT @ m.decays[:, :size, :size].mT).mT / 8


def sum_of_later_positions(m: Any, q: Any, k: Any, v: Any) -> Any:
    """Keys count the more the later they are."""
    weights = causal(q) * torch.arange(1, q.shape[2] + 1, device=q.device)
    return weights / weights.sum(-1, keepdim=True) @ v


RECURRENT: dict[str, tuple[Attend, ...]] = {
    "sums": (linear, of_products, elu, state_of_every_token), "decays": (retention, gated_linear, forgetting),
    "decays in matrices": (
        retention_by_buffer, retention_of_a_stack, retention_without_what_is_no_number,
        retention_by_the_sum_of_decays,
    ),
    "matrices alone": (
        mean_by_matrix, mean_of_the_recent, average_by_head, average_from_the_right, sum_of_later_positions,
    ),
}  # fmt: skip


@pytest.mark.parametrize("forms", RECURRENT)
def test_logits_of_attention_as_a_recurrence(forms: str, tmp_path: Path) -> None:
    check(made(InTurn(RECURRENT[forms])), tmp_path)


def random_ahead(m: Any, s: Any) -> Any:
    size = s.shape[-1]
    return s.masked_fill(~m.any_key[:size, :size], -math.inf)


def prefix(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill((k > q) & (k >= 5), -math.inf)


def no_mask(m: Any, s: Any) -> Any:
    return s


def by_both_positions(m: Any, s: Any) -> Any:
    """Added by q + k."""
    q, k = qk(s)
    return fill(m, s + m.rel((q + k) % 32).permute(2, 0, 1))


def from_the_end(m: Any, s: Any) -> Any:
    """By the distance, but counted from the length."""
    q, k = qk(s)
    return fill(m, s + m.rel((s.shape[-1] - q + k) % 32).permute(2, 0, 1))


def ahead_by_distance(m: Any, s: Any) -> Any:
    """Nothing hides later keys."""
    q, k = qk(s)
    return s + m.rel((q - k).clamp(0, 31)).permute(2, 0, 1)


def by_distance_and_token(m: Any, q: Any, k: Any, v: Any) -> Any:
    i, j = qk(q @ k.transpose(-2, -1))
    bias = m.rel((i - j).clamp(0, 31)).permute(2, 0, 1) * v[:, :, :, :1]
    return fill(m, q @ k.transpose(-2, -1) + bias).softmax(-1) @ v


def off_by_one(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill(k > q + 1, -math.inf)


def window_both_ways(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill((q - k).abs() >= 9, -math.inf)


def window_alone(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill(q - k >= 9, -math.inf)


def only_lowered(m: Any, s: Any) -> Any:
    """Later keys keep some weight."""
    q, k = qk(s)
    return s - (k > q) * 10.0


def zeroed(m: Any, s: Any) -> Any:
    """Zero is a score like any other."""
    return s.tril()


def chosen_by_content(m: Any, s: Any) -> Any:
    q, k = qk(s)
    return s.masked_fill((k > q) | ((s < 0) & (k < q)), -math.inf)


def only_at_the_end(m: Any, s: Any) -> Any:
    """Causal below position 120."""
    q, k = qk(s)
    return s.masked_fill((k > q) & ~((q == 120) & (k == 121)), -math.inf)


def first_half(m: Any, s: Any) -> Any:
    """Depends on the length."""
    q, k = qk(s)
    return s.masked_fill((k > q) | ((k < s.shape[-1] // 2) & (k != q)), -math.inf)


def sdpa_without_mask(m: Any, q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k, v)


def sdpa_ahead(m: Any, q: Any, k: Any, v: Any) -> Any:
    size = q.shape[2]
    return sdpa(q, k, v, attn_mask=m.any_key[:size, :size])


def masked_after(m: Any, q: Any, k: Any, v: Any) -> Any:
    """The softmax has summed over later keys already."""
    return (q @ k.transpose(-2, -1)).softmax(-1).tril() @ v


def retention_of_both_signs(m: Any, q: Any, k: Any, v: Any) -> Any:
    at = torch.arange(q.shape[2], device=q.device)
    power = (m.slopes - 0.2)[:, None, None] ** (at[:, None] - at)
    return (q @ k.transpose(-1, -2) * torch.where(at[:, None] >= at, power, 0.0)) @ v


def over_queries(m: Any, q: Any, k: Any, v: Any) -> Any:
    return fill(m, q @ k.transpose(-2, -1)).softmax(-2).nan_to_num() @ v


def keys_of_later_tokens(m: Any, q: Any, k: Any, v: Any) -> Any:
    return sdpa(q, k.roll(-1, 2), v, is_causal=True)


def average(weights: Any) -> Attend:
    """Values weighted by positions alone: weights(distances [S,S]) -> [S,S]."""

    def attend(m: Any, q: Any, k: Any, v: Any) -> Any:
        return weights(distances(q)) @ v

    attend.__name__ = weights.__name__
    return attend


def of_both_signs(d: Any) -> Any:
    return (-0.5) ** d.clamp(min=0) * (d >= 0)


def of_near_keys(d: Any) -> Any:
    return ((d >= 0) & (d < 5)).float()


def of_earlier_keys_alone(d: Any) -> Any:
    return (d > 0).float()


def of_a_key_ahead(d: Any) -> Any:
    return (d >= -1).float()


def over_the_queries(d: Any) -> Any:
    return (d >= 0) / (d >= 0).float().sum(0)


def over_all_keys(d: Any) -> Any:
    return (d >= 0) / torch.exp(-d.abs().float()).sum(-1, keepdim=True)


def by_the_length(d: Any) -> Any:
    return (d >= 0) * (d / d.shape[0] + 1)


def decay_with_one_other(d: Any) -> Any:
    decays = torch.where(d >= 0, 0.9**d, 0.0)
    row = torch.arange(d.shape[0], device=d.device)[:, None]
    return torch.where((row == 100) & (d == 50), 2 * decays, decays)


REFUSED = (
    *map(average, (
        of_both_signs, of_near_keys, of_earlier_keys_alone, of_a_key_ahead, over_the_queries, over_all_keys,
        by_the_length, decay_with_one_other,
    )),
    *map(masked, (
        random_ahead, prefix, no_mask, off_by_one, window_both_ways, window_alone, only_lowered, zeroed,
        chosen_by_content, only_at_the_end, first_half, by_both_positions, from_the_end, ahead_by_distance,
    )),
    sdpa_without_mask, sdpa_ahead, masked_after, retention_of_both_signs, over_queries, keys_of_later_tokens,
    by_distance_and_token,
)  # fmt: skip


@pytest.mark.parametrize("attend", REFUSED, ids=lambda f: f.__name__)
def test_attention_that_is_not_of_earlier_keys_alone_is_refused(attend: Attend, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"(at|in|//) attention\b"):
        compiler.compile(made(Attention(attend)), tmp_path / "m.octavo", max_context=CONTEXT)
    assert not (tmp_path / "m.octavo").exists()


class Mixer(nn.Module):
    def __init__(self, mix: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.mix = mix
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3)
        self.mixing = nn.Parameter(torch.rand(CONTEXT, CONTEXT).tril())
        self.dilated = nn.Conv1d(HIDDEN, HIDDEN, 3, dilation=4, groups=HIDDEN)
        self.norm = nn.GroupNorm(4, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self, x)


MIXERS: dict[str, Callable[[Any, Any], Any]] = {
    "conv_both_ways": lambda m, x: m.conv(nn.functional.pad(x.transpose(1, 2), (1, 1))).transpose(1, 2),
    "conv_cut_ahead": lambda m, x: m.conv(nn.functional.pad(x.transpose(1, 2), (2, 2)))[
        ..., 1 : x.shape[1] + 1
    ].transpose(1, 2),
    "shift_to_the_left": lambda m, x: x + nn.functional.pad(x, (0, 0, -1, 1)),
    "flip": lambda m, x: x + x.flip(1),
    "roll": lambda m, x: x + x.roll(1, 1),
    "sort": lambda m, x: x.sort(dim=1).values,
    "topk": lambda m, x: x + x.topk(1, dim=1).values,
    "product_so_far": lambda m, x: x.tanh().cumprod(1),
    "maximum_so_far": lambda m, x: x.cummax(dim=1).values,
    "maximum": lambda m, x: x - x.amax(dim=1, keepdim=True),
    "softmax_over_tokens": lambda m, x: x.softmax(dim=1),
    "norm_over_tokens": lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2),
    "norm_of_everything": lambda m, x: x / x.square().mean().sqrt(),
    "first_token": lambda m, x: x + x[:, :1],
    "last_token": lambda m, x: x + x[:, -1:],
    "learned_mixing": lambda m, x: m.mixing[: x.shape[1], : x.shape[1]] @ x,
    "sum_from_the_end": lambda m, x: x + x.flip(1).cumsum(1).flip(1),
    "sum_of_all": lambda m, x: x + x.cumsum(1)[:, -1:],
    "length_scale": lambda m, x: x / x.shape[1],
    "positions_over_length": lambda m, x: (
        x * (torch.arange(x.shape[1], device=x.device) / x.shape[1])[:, None]
    ),
    "positions_from_the_end": lambda m, x: x * torch.arange(x.shape[1], 0, -1, device=x.device)[:, None],
    "rows_as_columns": lambda m, x: x.transpose(1, 2).reshape(x.shape),
    "fourier": lambda m, x: torch.fft.fft(x, dim=1).real,
}


def of_tokens_before(m: Any, x: Any) -> Any:
    """A causal convolution and shifts by one token, written in several ways."""
    conv = m.conv(nn.functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    return x + 0.3 * conv + 0.5 * shifted - nn.functional.pad(conv, (0, 0, 1, -1))


def cut_convolutions(m: Any, x: Any) -> Any:
    """A convolution over more zeros than it needs, cut to all lengths back that they allow."""
    length = x.shape[1]
    conv = m.conv(nn.functional.pad(x.transpose(1, 2), (4, 0)))
    return x + conv[..., :length].tanh().mT - conv[..., 1 : length + 1].mT / 2 + conv[..., 2:].mT / 3


def dilated_convolutions(m: Any, x: Any) -> Any:
    """Of every fourth token back, and of their norms in groups of channels."""
    norm = m.norm(x.reshape(-1, HIDDEN)).view_as(x)
    conv = m.dilated(nn.functional.pad(x.transpose(1, 2), (8, 0)))
    variance, _ = torch.var_mean(x, dim=-1, keepdim=True)
    return x + conv.mT.tanh() + m.dilated(nn.functional.pad(norm.mT, (8, 0))).mT - variance


def of_all_before(m: Any, x: Any) -> Any:
    """Running sums and means, one of what the other gives."""
    count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
    mean = x.cumsum(1) / count
    return (
        x + mean + 0.1 * (x * x.sigmoid()).transpose(1, 2).cumsum(-1).transpose(1, 2) - mean.cumsum(1) / count
    )


def test_logits_of_running_sums(tmp_path: Path) -> None:
    check(made(Attention(linear), Mixer(of_all_before)), tmp_path)


@pytest.mark.parametrize(
    "mix", [of_tokens_before, cut_convolutions, dilated_convolutions], ids=lambda f: f.__name__
)
def test_logits_of_what_reads_the_tokens_just_before(mix: Callable[[Any, Any], Any], tmp_path: Path) -> None:
    check(made(Attention(flagged), Mixer(mix)), tmp_path)


@pytest.mark.parametrize("name", MIXERS)
def test_what_mixes_tokens_is_refused_where_it_is(name: str, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"(at|in|//) mix\b"):
        model = made(Attention(flagged), Mixer(MIXERS[name]))
        compiler.compile(model, tmp_path / "m.octavo", max_context=CONTEXT)
    assert not (tmp_path / "m.octavo").exists()
