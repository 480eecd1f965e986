"""Layers that call published kernels of recurrences become one op each, and compute what transformers' own
functions do where those kernels are not installed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

import ir.ops
from compiler.importers import ImportRefused, load
from compiler.importers.recurrences import KERNELS, compute, kernel_name
from ir.ops.base import RefCall
from tests.importers.compare import TOLERANCE, worst

VOCAB, CONTEXT, HIDDEN = 61, 96, 32
LENGTHS = (1, 15, 16, 17, 70)
G, H, K, V = 2, 6, 8, 5  # of keys, of values, and their sizes
Tensor = torch.Tensor


class Layer(nn.Module):
    """Token ids to logits, with one recurrence between, of what linears of the hidden states are."""

    def __init__(self, sizes: dict[str, int], width: int, **kwargs: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(width, VOCAB)
        self.made = nn.ModuleDict({name: nn.Linear(HIDDEN, size) for name, size in sizes.items()})
        self.kwargs = kwargs

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.mix(**{name: layer(x) for name, layer in self.made.items()}).flatten(2))

    def mix(self, **made: Tensor) -> Tensor:
        raise NotImplementedError


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(2, (count, -1))


class GatedDeltaRule(Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"q": G * K, "k": G * K, "v": H * V, "g": H, "beta": H}, H * V, **kwargs)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = heads(q, G), heads(k, G), heads(v, H)
        g, beta = -nn.functional.softplus(g), beta.sigmoid()
        kwargs = {"use_qk_l2norm_in_kernel": True, "initial_state": None, **self.kwargs}
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, **kwargs)[0]


class OneByOne(GatedDeltaRule):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v = (nn.functional.normalize(heads(q, G), dim=-1), nn.functional.normalize(heads(k, G), dim=-1),
                   heads(v, H))  # fmt: skip
        g, beta = -nn.functional.softplus(g), beta.sigmoid()
        return torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **self.kwargs)[0]


class KimiDeltaAttention(Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"q": H * K, "k": H * K, "v": H * V, "g": H * K, "beta": H}, H * V, **kwargs)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g = (heads(x, H) for x in (q, k, v, g))
        g, beta = -nn.functional.softplus(g), beta.sigmoid()
        kwargs = {"use_qk_l2norm_in_kernel": True, **self.kwargs}
        return chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, **kwargs)[0]


class KimiOneByOne(KimiDeltaAttention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g = (heads(x, H) for x in (q, k, v, g))
        g, beta = -nn.functional.softplus(g), beta.sigmoid()
        return recurrent_kimi_delta_attention(q, k, v, g, beta, None, False, True, **self.kwargs)[0]


class ChunkScan(Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"x": H * V, "dt": H, "b": G * K, "c": G * K}, H * V, **kwargs)
        self.A, self.D, self.bias = (nn.Parameter(torch.randn(H)) for _ in range(3))

    def mix(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        kwargs = {"dt_bias": self.bias, "dt_softplus": True, "dt_limit": (0.3, 1.5), "D": self.D}
        x, b, c, a = heads(x, H), heads(b, G), heads(c, G), -self.A.exp()
        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=16, z=None, **{**kwargs, **self.kwargs})


class Plain(ChunkScan):
    """Without any of what a chunk scan may do around the recurrence."""

    def mix(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x, b, c, a = heads(x, H), heads(b, G), heads(c, G), -self.A.exp()
        return mamba2_chunk_scan(x, dt.sigmoid(), a, b, c, 16, **self.kwargs)


class SelectiveScan(Layer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__({"x": V, "dt": V, "b": K, "c": K, "z": V}, V, **kwargs)
        self.A, self.D, self.bias = (nn.Parameter(torch.randn(s)) for s in ((V, K), (V,), (V,)))
        self.conv = nn.Conv1d(V, V, 4, groups=V)

    def mix(self, **made: Tensor) -> Tensor:
        x, dt, b, c, z = (t.transpose(1, 2) for t in made.values())
        x = causal_conv1d_fn(x, self.conv.weight.squeeze(1), self.conv.bias, activation="silu", seq_idx=None)
        kwargs = {"z": z, "D": self.D, "delta_bias": self.bias, "delta_softplus": True, **self.kwargs}
        return mamba_selective_scan(x, dt, -self.A.exp(), b, c, **kwargs).transpose(1, 2)


LAYERS = (GatedDeltaRule, OneByOne, KimiDeltaAttention, KimiOneByOne, ChunkScan, Plain, SelectiveScan)


def built(kind: type[Layer], **kwargs: Any) -> Layer:
    torch.manual_seed(3)
    return kind(**kwargs).eval()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_one_recurrence_that_gives_what_transformers_computes(kind: type[Layer]) -> None:
    model = built(kind)
    imported = load(model, max_context=CONTEXT)
    assert Counter(op.kind for op in imported.graph.ops)["recurrence"] == 1
    for length in LENGTHS:
        assert worst(imported, model, length, VOCAB) < TOLERANCE


def test_queries_and_keys_are_not_normed_unless_the_kernel_does_it() -> None:
    model = built(GatedDeltaRule, use_qk_l2norm_in_kernel=False)
    with torch.no_grad():
        model.made.get_parameter("k.weight").mul_(0.2)  # so that the rule does not diverge
    assert worst(load(model, max_context=CONTEXT), model, 17, VOCAB) < TOLERANCE


STATE = torch.zeros(1)


@pytest.mark.parametrize(
    ("kind", "kwargs", "kernel", "name"),
    [
        (GatedDeltaRule, {"initial_state": STATE}, "chunk_gated_delta_rule", "initial_state"),
        (GatedDeltaRule, {"output_final_state": True}, "chunk_gated_delta_rule", "output_final_state"),
        (GatedDeltaRule, {"cu_seqlens": STATE}, "chunk_gated_delta_rule", "cu_seqlens"),
        (GatedDeltaRule, {"scale": 0.5}, "chunk_gated_delta_rule", "scale"),
        (OneByOne, {"initial_state": STATE}, "fused_recurrent_gated_delta_rule", "initial_state"),
        (KimiDeltaAttention, {"use_gate_in_kernel": True}, "chunk_kda", "use_gate_in_kernel"),
        (KimiOneByOne, {"cu_seqlens": STATE}, "fused_recurrent_kda", "cu_seqlens"),
        (ChunkScan, {"seq_idx": STATE}, "mamba_chunk_scan_combined", "seq_idx"),
        (ChunkScan, {"initial_states": STATE}, "mamba_chunk_scan_combined", "initial_states"),
        (Plain, {"z": STATE}, "mamba_chunk_scan_combined", "z"),
        (Plain, {"return_final_states": True}, "mamba_chunk_scan_combined", "return_final_states"),
        (SelectiveScan, {"return_last_state": True}, "selective_scan_fn", "return_last_state"),
        (SelectiveScan, {"position_indices": STATE}, "selective_scan_fn", "position_indices"),
    ],
)
def test_an_argument_of_unknown_meaning_is_refused_by_name(
    kind: type[Layer], kwargs: dict[str, Any], kernel: str, name: str
) -> None:
    with pytest.raises(ImportRefused, match=f"argument '{name}'") as refused:
        load(built(kind, **kwargs), max_context=CONTEXT)
    assert refused.value.op == kernel
    assert "test_recurrences.py" in refused.value.source_line


def test_what_transformers_has_for_the_kernels_is_back_afterwards() -> None:
    before = dict(globals())
    load(built(ChunkScan), max_context=CONTEXT)
    with pytest.raises(ImportRefused):
        load(built(Plain, z=STATE), max_context=CONTEXT)
    assert all(globals()[name] is value for name, value in before.items())
    assert {kernel_name(f) for f in before.values() if kernel_name(f)} == set(KERNELS)


@pytest.mark.parametrize("form", ["head", "channels", "rates"])
def test_the_op_in_torch_is_the_ir_s(form: str) -> None:
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal(s, np.float32) for s in ((1, G, 17, K), (1, G, 17, K), (1, H, 17, V)))
    size = {"head": 1, "channels": K, "rates": V}[form]
    decay = -random.random((1, H, 17, size), np.float32)
    beta = None if form == "rates" else random.random((1, H, 17, 1), np.float32)
    rates = random.random((H, K, V), np.float32) if form == "rates" else None
    args = (q, k, v, decay, beta, rates)
    expected = ir.ops.OPS["recurrence"].reference(RefCall("recurrence", args, {}, np.float32))[0]
    found = compute(*(None if a is None else torch.tensor(a) for a in args))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
