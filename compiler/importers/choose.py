"""The causal language model that transformers has for a configuration, on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.importers.config_limits import check_numbers
from compiler.importers.configuration import CHECK
from compiler.importers.export import quiet
from compiler.importers.refused import ImportRefused, one_line
from compiler.importers.stored_names import StoredNames, stored_names


def choose_model(config: Any, stored: tuple[str, ...], where: str = "config.json") -> tuple[Any, StoredNames]:
    """The causal language model of a configuration, and stored_names of it.

    Of a configuration with several parts it is the text part or the whole, of which text alone is computed:
    the one of which the checkpoint holds more.
    """
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "model_type"):  # transformers takes whatever stands at its place
        todo = "Correct it in a copy of the checkpoint"
        raise ImportRefused("its text_config is not a configuration", where=where, todo=todo)
    models = [_instantiate(*each, where) for each in _classes(text, config)] or [instantiate(text, where)]
    found = [(model, stored_names(model, stored)) for model in models]
    return min(found, key=lambda pair: _num_missing(pair[0], pair[1].own))


def _num_missing(model: Any, names: Mapping[str, str]) -> int:
    """Parameters that are not stored under any of their names."""
    groups: dict[int, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)] = groups.get(id(parameter), False) or name in names
    return sum(not is_stored for is_stored in groups.values())


def _classes(text: Any, config: Any) -> list[tuple[Any, Any]]:
    """Classes of causal language models with what each is made of: the whole's may be made of its text."""
    found: dict[int, tuple[Any, Any]] = {}
    for part in (text, config):
        made = language_model(part)
        if made is not None:
            own = made.config_class is not None and isinstance(text, made.config_class)
            found.setdefault(id(made), (made, text if own else part))
    return list(found.values())


def language_model(config: Any) -> Any:
    """The class of transformers' causal language model of a configuration; None if it has none.

    That of a text part may be known by the whole's configuration alone: the text's then names its class.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    mapping: Any = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in mapping:
        return mapping[type(config)]
    named = getattr(config, "architectures", None)
    known = set(NAMES.values())
    wanted = [n for n in named if isinstance(n, str) and n in known] if isinstance(named, list) else []
    classes = [getattr(transformers, name) for name in wanted]
    return next((c for c in classes if c.config_class is type(config)), None)


def instantiate(config: Any, where: str = "config.json") -> Any:
    """The causal language model of a configuration, parameters on the meta device, float32, in eval mode."""
    made = language_model(config)
    if made is None:
        raise ImportRefused(
            f"transformers has no causal language model for the model type {config.model_type!r}",
            where=where,
            todo="Compile a checkpoint of a decoder-only language model",
        )
    return _instantiate(made, config, where)


def _instantiate(made: Any, config: Any, where: str) -> Any:
    import torch
    from accelerate import init_empty_weights

    from compiler.importers.bounded import Bounded

    check_numbers(config.to_dict(), where)
    with quiet(), init_empty_weights(include_buffers=False), Bounded(where):
        try:
            model = made._from_config(config, attn_implementation="eager", dtype=torch.float32)
        except ImportRefused:
            raise
        except Exception as error:  # negative or absurd sizes, an unknown activation or rotary type
            what = f"it makes no {config.model_type} model: {one_line(error)}"
            raise ImportRefused(what, where=where, todo=CHECK) from error
    model.tie_weights()  # outside: init_empty_weights gives every assigned parameter a tensor of its own
    return model.eval()
