"""A user's module, changed for the time of an export and given back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """In eval mode; each module's own mode comes back. The module of an exported program has the mode that it
    was exported in, which its graph holds."""
    modes = [(m, m.training) for m in module.modules()]
    with suppress(NotImplementedError):
        module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextmanager
def as_float32(module: Any) -> Iterator[None]:
    """With float32 stand-ins, which take no memory, for parameters and buffers of other float types.

    A half-precision model is computed in float32 from its own values, which a float32 holds exactly. Only
    shapes and types of the stand-ins may be used, but for the value of a single number.
    """
    import torch

    made: dict[int, Any] = {}
    changed: list[tuple[Any, str, Any]] = []
    try:
        for each in module.modules():
            for table in (each._parameters, each._buffers):
                for name, tensor in table.items():
                    if tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float32:
                        continue
                    stand_in = made.setdefault(id(tensor), _stand_in(tensor))
                    changed.append((table, name, tensor))
                    table[name] = stand_in
        yield
    finally:
        for table, name, tensor in changed:
            table[name] = tensor


def _stand_in(tensor: Any) -> Any:
    import torch

    if tensor.ndim == 0:
        value = tensor.detach().float()
    else:
        value = torch.zeros((), device=tensor.device).expand(tensor.shape)
    return torch.nn.Parameter(value, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else value


@contextmanager
def attention_implementation(models: list[Any], name: str) -> Iterator[None]:
    """transformers' models with another attention function."""
    before = [m.config._attn_implementation for m in models]
    try:
        for model in models:
            model.set_attn_implementation(name)
        yield
    finally:
        for model, implementation in zip(models, before, strict=True):
            _set_back(model, implementation)


def _set_back(model: Any, name: str) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) is not None:
            config._attn_implementation = name


@contextmanager
def flags_of_sizes() -> Iterator[None]:
    """Inside, torch's attention takes is_causal=(length > 1), which becomes a guard on the length."""
    import torch
    from torch.fx.experimental.symbolic_shapes import uninteresting_files

    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention

    def attend(*args: Any, is_causal: Any = False, **kwargs: Any) -> Any:
        args = (*args[:5], bool(args[5]), *args[6:]) if len(args) > 5 else args
        flag = {} if len(args) > 5 else {"is_causal": bool(is_causal)}
        return original(*args, **flag, **kwargs)

    functional.scaled_dot_product_attention = attend
    uninteresting_files().add(__file__)  # so that torch blames the guard on the model's line
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original
        uninteresting_files().discard(__file__)


def transformers_models(module: Any) -> list[Any]:
    """The outermost models of transformers in a module: itself, or parts of it."""
    import sys

    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in transformers_models(child)]
