"""The causal language models of the installed transformers, and a tiny checkpoint without weights of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiler.importers.choose import choose_model
from compiler.importers.export import quiet
from compiler.importers.refused import ImportRefused, one_line
from compiler.importers.tiny_config import CONTEXT, VOCAB_SIZE, tiny_configs

__all__ = ["CONTEXT", "model_types", "tiny_config", "version", "write_tiny"]

MAX_PARAMETERS = 20_000_000  # of a model that is still called tiny
NUM_TOKENS = 20
NO_MODEL = "Give it a configuration of its own: octavo explain DIRECTORY"


def model_types() -> tuple[str, ...]:
    """By name. Those that are no decoders (a masked language model can be had as a causal one) are among
    them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def version() -> str:
    import transformers

    return transformers.__version__


def tiny_config(model_type: str, changes: Mapping[str, Any] | None = None) -> Any:
    """A configuration whose model runs, of two layers or one of each kind. changes: fields to set otherwise.

    Raises ImportRefused where none is found.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    why: Exception | None = None
    try:
        with quiet():
            for config in tiny_configs(CONFIG_MAPPING[model_type], changes):
                try:
                    _try(config)
                except Exception as error:  # of the sizes, or of the model's own code
                    why = why or error
                    continue
                return config
    except Exception as error:  # of the configuration class
        why = why or error
    reason = why.what if isinstance(why, ImportRefused) else one_line(why or ValueError("no sizes fit"))
    what = f"no tiny model can be made of it: {reason}"
    raise ImportRefused(what, where=model_type, todo=NO_MODEL) from why


def _try(config: Any) -> None:
    """Make the model and compute a few tokens with it: some sizes are only found wrong then."""
    import torch

    model, _ = choose_model(config, ())
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise ImportRefused(f"its smallest model has {count:,} parameters", where=config.model_type)
    real = type(model)._from_config(model.config, attn_implementation="eager").eval()
    with torch.no_grad():
        real(input_ids=torch.arange(NUM_TOKENS)[None] % VOCAB_SIZE, use_cache=False)


def write_tiny(model_type: str, directory: Path) -> None:
    """Write a config.json of a tiny model. Raises ImportRefused where there is none."""
    with quiet():
        tiny_config(model_type).save_pretrained(directory)
