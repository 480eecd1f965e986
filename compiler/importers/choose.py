"""The causal language model that transformers has for a configuration, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.importers.config_limits import check_numbers
from compiler.importers.configuration import CHECK
from compiler.importers.export import quiet
from compiler.importers.refused import ImportRefused, one_line
from compiler.importers.stored_names import stored_names


def choose_model(
    config: Any, stored: tuple[str, ...], where: str = "config.json"
) -> tuple[Any, dict[str, str]]:
    """The causal language model of a configuration, and stored_names of it.

    Of a configuration with several parts it is the text part or the whole, of which text alone is computed:
    the one of which the checkpoint holds more.
    """
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "model_type"):  # transformers takes whatever stands at its place
        todo = "Correct it in a copy of the checkpoint"
        raise ImportRefused("its text_config is not a configuration", where=where, todo=todo)
    parts = [part for part in (text, config) if has_language_model(part)][: 1 if text is config else 2]
    models = [instantiate(part, where) for part in parts or [text]]
    found = [(model, stored_names(model, stored)) for model in models]
    return min(found, key=lambda pair: _num_missing(*pair))


def _num_missing(model: Any, names: Mapping[str, str]) -> int:
    """Parameters that are not stored under any of their names."""
    groups: dict[int, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)] = groups.get(id(parameter), False) or name in names
    return sum(not is_stored for is_stored in groups.values())


def has_language_model(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    return type(config) in mapping


def instantiate(config: Any, where: str = "config.json") -> Any:
    """The causal language model of a configuration, parameters on the meta device, float32, in eval mode."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from compiler.importers.bounded import Bounded

    if not has_language_model(config):
        raise ImportRefused(
            f"transformers has no causal language model for the model type {config.model_type!r}",
            where=where,
            todo="Compile a checkpoint of a decoder-only language model",
        )
    check_numbers(config.to_dict(), where)
    mapping: Any = AutoModelForCausalLM._model_mapping
    make = mapping[type(config)]._from_config
    with quiet(), init_empty_weights(include_buffers=False), Bounded(where):
        try:
            model = make(config, attn_implementation="eager", dtype=torch.float32)
        except ImportRefused:
            raise
        except Exception as error:  # negative or absurd sizes, an unknown activation or rotary type
            what = f"it makes no {config.model_type} model: {one_line(error)}"
            raise ImportRefused(what, where=where, todo=CHECK) from error
    model.tie_weights()  # outside: init_empty_weights gives every assigned parameter a tensor of its own
    return model.eval()
