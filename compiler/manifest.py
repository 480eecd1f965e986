"""What an artifact's manifest says (docs/artifact.md), put together from the parts of a compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from codegen.cpp import Kernel
from codegen.kv_block import block_bytes
from compiler.importers import ModelInfo
from ir.graph import Graph
from ir.types import KV
from runtime.hashes import file_hash


def octavo_version() -> str:
    """The installed version, or "source" where the tree is used without being installed."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "source"


def source_entry(info: ModelInfo) -> dict[str, Any]:
    """Where the model came from: the path's last part, and the hash of each file that was read."""
    path = Path(info.source_path)
    directory = path if path.is_dir() else path.parent
    files = {name: f"sha256:{file_hash(directory / name)}" for name in info.source_files}
    return {"kind": info.source_kind, "path": path.name, "files": files}


def model_entry(info: ModelInfo, dtype: str, quantization: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "vocab_size": info.vocab_size,
        "max_context": info.max_context,
        "bos_token_id": info.bos_token_id,
        "eos_token_ids": list(info.eos_token_ids),
        "frozen": dict(info.frozen),
        "quantization": quantization,
    }


def kernel_entry(kernel: Kernel, folder: str) -> dict[str, Any]:
    """A built kernel; its file and sources are named relative to the artifact."""
    entry = asdict(kernel)
    entry["file"] = f"{folder}/{kernel.file}"
    entry["sources"] = [f"{folder}/{name}" for name in kernel.sources]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in entry.items()}


def kv_groups(lowered: Graph) -> list[dict[str, Any]]:
    """The lowered graph's KV groups, in order."""
    return [_kv_group(value.type) for value in lowered.inputs if isinstance(value.type, KV)]


def _kv_group(kv: KV) -> dict[str, Any]:
    streams = [
        {
            "name": s.name,
            "dtype": str(s.dtype),
            "per": "block" if s.per_block else s.per,
            "heads": s.heads,
            "head_size": s.head_size,
        }
        for s in kv.streams
    ]
    per_token = 0 if kv.state else kv.bytes_per_block / kv.block
    return {
        "layers": kv.layers,
        "window": kv.window,
        "tail": kv.tail,
        **({"state": True} if kv.state else {}),
        "block": kv.block,
        "bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
        "block_bytes": block_bytes(kv),
        "streams": streams,
    }


def tokenizer_entry(files: Mapping[str, Any]) -> dict[str, Any]:
    return {"present": bool(files), "files": [f"tokenizer/{name}" for name in files]}
