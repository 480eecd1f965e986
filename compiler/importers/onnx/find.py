"""Where an ONNX model is, found without reading it."""

from __future__ import annotations

from pathlib import Path

from compiler.files import is_file
from compiler.importers.refused import ImportRefused


def onnx_file(path: Path) -> Path | None:
    """The model's file: the path itself, or the one in a directory that has no weights of another format.

    Raises ImportRefused where a directory holds several.
    """
    if path.suffix == ".onnx" and is_file(path):
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.onnx")) or sorted((path / "onnx").glob("model.onnx"))
    named = [f for f in files if f.name == "model.onnx"]
    if len(files) > 1 and not named:
        what = f"it holds {len(files)} ONNX files: {', '.join(f.name for f in files[:4])}"
        raise ImportRefused(what, where=str(path), todo="Give one of the files")
    return next(iter(named or files), None)
