"""What depends on the total length is fixed for the compile's context: rotary frequencies, picks of keys."""

from __future__ import annotations

from typing import Any

from compiler.importers.refused import OTHER_FILE, ImportRefused


def freeze_rope(model: Any, config: Any, context: int) -> dict[str, str]:
    """Compute the frequencies of dynamic and long rotary embeddings once, as for `context` tokens.

    Returns what was frozen, by module path.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frozen: dict[str, str] = {}
    for path, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            options = {} if layer_type is None else {"layer_type": layer_type}
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=context, **options)
            prefix = "" if layer_type is None else f"{layer_type}_"
            module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
            setattr(module, f"{prefix}attention_scaling", scaling)
            if isinstance(kinds, dict):
                kinds[layer_type] = "default"
            else:
                module.rope_type = "default"
            frozen[f"{path}.{prefix}inv_freq"] = f"{kind} rotary embedding at a length of {context}"
    return frozen


def freeze_picks(model: Any, context: int, where: str) -> dict[str, str]:
    """Let queries that pick the keys or blocks of keys that they look at see all, where no more are there.

    Returns what was frozen, by module path. Raises ImportRefused where a context has more.
    """
    frozen: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        picked = _picked(module)
        if picked is None:
            continue
        count, what = picked
        if count < context:
            raise ImportRefused(
                f"each query of {path} picks the {what} that it looks at, and up to {context} keys are there",
                where=where,
                todo=f"Compile with --max-context {count} or less, where it picks all" if count else "",
            )
        parent = model.get_submodule(path.rpartition(".")[0])
        if hasattr(module, "topk_blocks"):  # its attention asks whether it is there
            setattr(parent, path.rpartition(".")[2], None)
        frozen[path] = f"queries look at all keys: the {what} that they pick are all of {context}"
    return frozen


def _picked(module: Any) -> tuple[int, str] | None:
    """How many keys a module picks for each query, and in words; None if it picks none."""
    keys, blocks, size = (getattr(module, n, None) for n in ("index_topk", "topk_blocks", "block_size"))
    if type(keys) is int:
        return keys, f"{keys} keys"
    if type(blocks) is int and type(size) is int:
        return blocks * size, f"{blocks} blocks of {size} keys"
    return None


def divide_frequencies(model: Any, divisors: Any, where: str = "checkpoint") -> None:
    """Divide every rotary frequency [D/2] by a number of its own. Raises ImportRefused where they do not fit.

    where: the file's path.
    """
    import torch

    divided = torch.from_numpy(divisors)
    found = [(m, n) for m in model.modules() for n, b in m._buffers.items() if n.endswith("inv_freq")]
    for module, name in found:
        if module._buffers[name].shape != divided.shape:
            count = module._buffers[name].numel()
            what = f"the file scales {divided.numel()} rotary frequencies, and the model has {count}"
            raise ImportRefused(what, where=where, todo=OTHER_FILE)
        module._buffers[name] = module._buffers[name] / divided
    if not found:
        what = "the file scales rotary frequencies, and the model has none"
        raise ImportRefused(what, where=where, todo=OTHER_FILE)
