"""Importers: the only users of torch, transformers and onnx.

`load` imports a checkpoint directory, a .gguf or .onnx file, a torch.nn.Module or an ExportedProgram.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiler.importers.model import Imported, ModelInfo
from compiler.importers.onnx.find import onnx_file
from compiler.importers.refused import ImportRefused

GIVE = "Give a checkpoint directory, or a .gguf or .onnx file"
__all__ = ["ImportRefused", "Imported", "ModelInfo", "load"]


def load(
    source: Any,
    *,
    max_context: int | None = None,
    weights: bool = True,
    keep_grid: bool = False,
    example_inputs: Any = None,
) -> Imported:
    """Import a model. Raises ImportRefused or WeightError, saying what is wrong, where, and what to do.

    source: the path of a checkpoint directory or of a .gguf or .onnx file, a torch.nn.Module, or an
    ExportedProgram.
    max_context: the longest sequence to compile for; by default what the model's configuration says.
    weights: False for shapes alone, of which a checkpoint directory needs no more than config.json.
    keep_grid: read quantised matrices as the codes and scales that the checkpoint holds; otherwise as the
    floats that they stand for.
    example_inputs: arguments of a call of a module, by place or by keyword.
    """
    if max_context is not None and max_context < 1:
        raise ImportRefused(f"max_context = {max_context}", where="source", todo="Give one of at least 1")
    if not weights and not (isinstance(source, str | Path) and Path(source).is_dir()):
        raise ImportRefused(
            "shapes alone (--no-weights) are read from a directory with a config.json",
            where=str(source) if isinstance(source, str | Path) else type(source).__name__,
            todo="Give such a directory, or leave out --no-weights",
        )
    if keep_grid and not (weights and isinstance(source, str | Path)):
        raise ImportRefused(
            "only a file's or a directory's own weights have a grid to keep",
            where=str(source) if isinstance(source, str | Path) else type(source).__name__,
            todo="Give a checkpoint that is quantised, with its weights",
        )
    if not isinstance(source, str | Path):
        from compiler.importers.module import load_module

        return load_module(source, max_context, example_inputs)
    if example_inputs is not None:
        todo = "Leave them out: a file says what its inputs are"
        raise ImportRefused("example_inputs without a module", where=str(source), todo=todo)
    path = Path(source)
    if (model := onnx_file(path)) is not None:
        from compiler.importers.onnx.load import load_onnx

        return load_onnx(model, max_context, keep_grid=keep_grid)
    if path.is_dir():
        _check_is_checkpoint(path)
        from compiler.importers.huggingface import load_directory

        return load_directory(path, max_context, weights=weights, keep_grid=keep_grid)
    if path.is_file() and path.suffix == ".gguf":
        from compiler.importers.gguf import load_gguf

        return load_gguf(path, max_context, keep_grid=keep_grid)
    if not path.exists():
        raise ImportRefused("it does not exist", where=str(path), todo=GIVE + _download(path))
    what = "neither a checkpoint directory nor a .gguf or .onnx file"
    raise ImportRefused(what, where=str(path), todo=GIVE)


def _check_is_checkpoint(path: Path) -> None:
    """Raise ImportRefused for a folder of GGUF files alone."""
    files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if files:
        what = "it holds a GGUF file" if len(files) == 1 else f"it holds {len(files)} GGUF files"
        raise ImportRefused(f"{what} and no config.json", where=str(path), todo=f"Give the file: {files[0]}")


def _download(path: Path) -> str:
    """What else to do where a path is missing that may be a name on a model hub: OWNER/NAME."""
    if len(path.parts) != 2 or path.parent.exists() or path.is_absolute() or path.parts[0].startswith("."):
        return ""
    fetch = f"hf download {path} --local-dir {path.name}"
    return f"; nothing is downloaded here, so fetch a model of a hub first: {fetch}"
