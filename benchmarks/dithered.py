"""The demo model off its grid: a directory, and GGUF files of it as F32, Q8_0 and Q4_0.

The weights of its checkpoint lie on a grid of 4 bits in groups of 32, which a format of 4 bits could keep:
that would say nothing about models that never were on one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors import safe_open
from safetensors.numpy import save_file

from qualitybench import gguf_files
from sidebyside import models

GROUP, LEVELS = 32, 15


def command(
    source: Annotated[Path, typer.Argument(help="The demo model's GGUF file.")],
    folder: Annotated[Path, typer.Argument(help="Gets dithered/, dithered.gguf and two more.")],
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write them all."""
    exact, directory = models.huggingface(source, folder), folder / "dithered"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(exact, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    rng = np.random.default_rng(seed)
    with safe_open(exact / "model.safetensors", "np") as tensors:
        moved = {name: _moved(name, tensors.get_tensor(name), rng) for name in sorted(tensors.keys())}
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    gguf_files.write(directory, folder / "dithered.gguf", source)
    for type_name in ("Q8_0", "Q4_0"):
        (folder / f"dithered.as-{type_name}.gguf").unlink(missing_ok=True)
        models.gguf(folder / "dithered.gguf", folder, type_name)


def _moved(name: str, weight: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Off its grid by up to half a step; vectors and embeddings stay."""
    if weight.ndim < 2 or "embed" in name:
        return weight
    groups = weight.reshape(-1, GROUP)
    step = (groups.max(1, keepdims=True) - groups.min(1, keepdims=True)) / LEVELS
    noise = rng.random(groups.shape, np.float32) - np.float32(0.5)
    return (groups + noise * step).reshape(weight.shape)


if __name__ == "__main__":
    typer.run(command)
