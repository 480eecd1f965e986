"""Attention as one op: our attention and mask functions in transformers' interfaces during one export.

The attention function calls the op octavo::attention, which only has a shape. The mask function evaluates
transformers' own mask closure on index tensors inside the traced graph, so that the export holds the mask
as comparisons of positions, whatever it is; it is proved, or refused, by a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from compiler.importers.refused import ImportRefused

NAME = "octavo"

_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, "
    "float scale, float softcap, bool causal, int window) -> Tensor"
)

# What transformers passes along that does not change the result of an attention without a cache.
IGNORED = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict",
     "cache_position", "position_embeddings", "logits_to_keep", "layer_idx", "output_router_logits"}
)  # fmt: skip


@dataclass
class Run:
    """One call of an attention module."""

    path: str
    recurrent: bool = False  # it computed a recurrence


@dataclass
class Markers:
    """How often the attention function ran, and in which modules attention should have run."""

    paths: dict[int, str]
    calls: int = 0
    runs: list[Run] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)

    def recurrence(self) -> None:
        """A recurrence was computed, in place of the attention of a module that runs."""
        if self.running:
            self.running[-1].recurrent = True

    def complete(self) -> bool:
        """Whether it ran for every attention module that ran, without a recurrence or another inside it."""
        ran = {r.path for r in self.runs}
        expected = [
            r for r in self.runs if not r.recurrent and not any(p.startswith(f"{r.path}.") for p in ran)
        ]
        return self.calls == len(expected) > 0


@contextmanager
def attention_markers(model: Any) -> Iterator[Markers]:
    """Inside, the attention implementation "octavo" exists; afterwards nothing of it is left."""
    import torch
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    markers = Markers({id(m): path for path, m in model.named_modules()})
    hooks = [hook for path, m in attention_modules(model) for hook in _recorded(markers, path, m)]
    with torch.library._scoped_library(NAME, "FRAGMENT") as library:
        library.define(_SCHEMA)
        torch.library.register_fake(f"{NAME}::attention", _shape, lib=library)
        AttentionInterface.register(NAME, _attention_function(markers))
        AttentionMaskInterface.register(NAME, _mask)
        try:
            yield markers
        finally:
            AttentionMaskInterface._global_mapping.pop(NAME, None)
            AttentionInterface._global_mapping.pop(NAME, None)
            for hook in hooks:
                hook.remove()


@contextmanager
def one_sequence() -> Iterator[None]:
    """Inside, transformers does not look for several sequences packed into one: there is one."""
    from transformers import masking_utils

    packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = packed


def attention_modules(model: Any) -> list[tuple[str, Any]]:
    return [(path, m) for path, m in model.named_modules() if "Attention" in type(m).__name__]


def _recorded(markers: Markers, path: str, module: Any) -> tuple[Any, Any]:
    def start(module: Any, args: Any) -> None:
        markers.runs.append(Run(path))
        markers.running.append(markers.runs[-1])

    def end(module: Any, args: Any, out: Any) -> None:
        markers.running.pop()

    return module.register_forward_pre_hook(start), module.register_forward_hook(end)


def _shape(
    q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float, softcap: float, causal: bool, window: int
) -> Any:
    """[B,H,S,D], [B,G,S,D], [B,G,S,E] -> [B,S,H,E]."""
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _attention_function(markers: Markers) -> Any:
    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        indices: Any = None,
        **others: Any,
    ) -> Any:
        import torch

        path = markers.paths.get(id(module), type(module).__name__)
        unknown = sorted(k for k, v in others.items() if v is not None and k not in IGNORED)
        if unknown:
            raise ImportRefused(
                f"attention takes the argument {unknown[0]!r}, whose meaning is not known here",
                where=path,
                todo="Write the attention out in matmul and softmax, or without it",
            )
        if indices is not None:
            _check_all(indices, key, path)
        markers.calls += 1
        causal = _is_causal(module, path, is_causal) if attention_mask is None else False
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        window = sliding_window if attention_mask is None and sliding_window else 0
        call = torch.ops.octavo.attention
        return call(
            query, key, value, attention_mask, s_aux, scale, float(softcap or 0.0), causal, window
        ), None

    return attend


def _check_all(indices: Any, key: Any, path: str) -> None:
    """Which keys each query looks at, [B,S,n], different ones: as many as there are are all of them."""
    if indices.shape[-1] != key.shape[2]:
        raise ImportRefused(
            f"each query looks at {indices.shape[-1]} keys that it picks",
            where=path,
            todo="Let it see all keys",
        )


def _is_causal(module: Any, path: str, given: bool | None) -> bool:
    """As transformers decides where a model makes no mask: the keyword, else the module's attribute."""
    found = getattr(module, "is_causal", None) if given is None else given
    if found is None:
        raise ImportRefused(
            "attention has neither a mask nor an is_causal, so what it sees is not known",
            where=path,
            todo="Set is_causal on the module",
        )
    return bool(found)


def _mask(
    batch_size: int,
    q_length: Any,
    kv_length: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    device: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> Any:
    """The boolean mask [1, 1, S, S] as the model's mask function computes it from positions."""
    import torch
    from transformers.masking_utils import and_masks, padding_mask_function

    if attention_mask is not None:
        mask_function = and_masks(mask_function, padding_mask_function(attention_mask))
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
    query = torch.arange(q_length, device=device).reshape(1, 1, -1, 1)
    key = torch.arange(kv_length, device=device).reshape(1, 1, 1, -1)
    query = query if isinstance(q_offset, int) and q_offset == 0 else query + q_offset
    key = key if isinstance(kv_offset, int) and kv_offset == 0 else key + kv_offset
    mask = mask_function(zero, zero, query, key)
    return mask.expand(1, 1, q_length, kv_length)
