"""Experts as linears of chosen matrices: our function in transformers' interface during one export.

It calls the op octavo::moe_linear, which only has a shape, for the two matrices of each expert; the gate, a
norm and the weighted sum over a token's experts are traced as the model has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compiler.importers.context import Context
from compiler.importers.markers import NAME
from compiler.importers.refused import ImportRefused
from ir.dims import product

_SCHEMA = "moe_linear(Tensor x, Tensor w, Tensor experts, Tensor? bias, bool transposed) -> Tensor"


@contextmanager
def expert_markers() -> Iterator[None]:
    """Inside, every module of experts that asks transformers how to compute calls octavo::moe_linear."""
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    with torch.library._scoped_library(NAME, "FRAGMENT") as library:
        library.define(_SCHEMA)
        torch.library.register_fake(f"{NAME}::moe_linear", _shape, lib=library)
        interface: Any = ALL_EXPERTS_FUNCTIONS
        interface.get_interface = lambda implementation, default: _experts
        try:
            yield
        finally:
            del interface.get_interface


def _shape(x: Any, w: Any, experts: Any, bias: Any, transposed: bool) -> Any:
    """[T,K] or [T,k,K], [E,N,K] or transposed [E,K,N], [T,k] -> [T,k,N]."""
    return x.new_empty((*experts.shape, w.shape[2 if transposed else 1]))


def _experts(module: Any, hidden: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """What transformers computes for tokens [T,H] with the experts [T,k] and their weights [T,k]."""
    import torch

    if module._is_expert_parallel or hidden.ndim != 2:
        what = "experts that are shared out among devices, or whose tokens are not one axis"
        raise ImportRefused(what, where=type(module).__name__, todo="Load the model for one device")
    linear, count = torch.ops.octavo.moe_linear, top_k_index.shape[-1]
    index, weights = (t.reshape(hidden.shape[0], count) for t in (top_k_index, top_k_weights))

    def project(x: Any, name: str) -> Any:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return linear(x, getattr(module, name), index, bias, module.is_transposed)

    y = module._apply_gate(project(hidden, "gate_up_proj")) if module.has_gate else None
    y = module.act_fn(project(hidden, "up_proj")) if y is None else y
    y = project(y, "down_proj")
    y = module.post_expert_norm(y) if module.has_post_expert_norm else y
    return (y * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def convert_moe_linear(c: Context, x: Any, w: Any, experts: Any, bias: Any, transposed: bool) -> Any:
    """octavo::moe_linear: the experts' matrices are made one, [E*N,K]."""
    count = c.type(w).shape[0]
    w = c.op("transpose", w, perm=(0, 2, 1)) if transposed else w
    shape = c.type(w).shape
    return c.op(
        "moe_linear", x, c.reshape(w, (product(shape[:2]), shape[2])), experts, bias, num_experts=count
    )
