"""Tiny random models of transformers' model types, and their checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

from compiler.importers.installed import tiny_config

DATA = json.loads((Path(__file__).parents[1] / "data" / "zoo" / "types.json").read_text())
CORE, STATEFUL, SUBSET = DATA["core"], DATA["stateful"], DATA["subset"]
REFUSED: dict[str, str] = DATA["refused"]
SPREAD = 0.2  # of what starts as a constant: norms' weights, biases, sinks


def build(model_type: str, seed: int = 0) -> Any:
    """A float32 model in eval mode, by transformers' own choice of its class."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = tiny_config(model_type, DATA["sizes"].get(model_type))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model, seed)
    return model.eval().float(), config


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Every array that a checkpoint holds: matrices such that what is normed stays near 1, vectors and
    constants off the ones and zeros that they start as."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for array in {id(t): t for t in model.state_dict(keep_vars=True).values()}.values():
            if not array.is_floating_point():
                continue
            noise = torch.randn(array.shape, generator=random)
            constant = array.numel() < 2 or bool((array == array.flatten()[0]).all())
            if array.ndim < 2 or constant:
                array.nan_to_num_().add_(noise * SPREAD)
            else:
                array.copy_(noise / math.sqrt(array.shape[-1]))


def save(model_type: str, seed: int, directory: Path) -> Any:
    """Write a checkpoint of the model, with the configuration of the whole, and return the model."""
    model, config = build(model_type, seed)
    model.save_pretrained(directory)
    config.save_pretrained(directory)
    return model
