"""What is compared: artifacts and GGUF files, each with the logits that it gives and the bits of a weight."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qualitybench import octavo_logits

Array = np.ndarray[Any, np.dtype[Any]]
LLAMACPP = Path(__file__).parent / "llamacpp_logits.py"


@dataclass(frozen=True)
class Model:
    """write: logits [W, S, V] of token ids [W, S] into an .npy file. num_bytes: of all weights as stored."""

    engine: str
    name: str
    path: Path
    num_bytes: int
    write: Callable[[Array, Path], None]


def artifact(name: str, path: Path, threads: int) -> Model:
    def write(windows: Array, out: Path) -> None:
        octavo_logits.write_logits(path, windows, out, threads)

    return Model("Octavo", name, path, octavo_logits.weight_bytes(path), write)


def gguf(name: str, path: Path, threads: int, python: Path) -> Model:
    """python: of an environment with llama-cpp-python."""
    from gguf import GGUFReader

    def write(windows: Array, out: Path) -> None:
        ids = out.with_suffix(".ids.npy")
        np.save(ids, windows)
        subprocess.run([python, LLAMACPP, path, ids, out, str(threads)], check=True)

    num_bytes = sum(int(tensor.n_bytes) for tensor in GGUFReader(path).tensors)
    return Model("llama.cpp", name, path, num_bytes, write)
