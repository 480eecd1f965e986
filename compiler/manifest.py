"""What an artifact's manifest says (docs/artifact.md), put together from the parts of a compile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compiler.artifact import hash_file
from ir.graph import Graph
from ir.types import KV

ALIGNMENT_BYTES = 64


def octavo_version() -> str:
    """The installed version, or "source" where the tree is used without being installed."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "source"


def source_entry(kind: str, path: str, files: Sequence[Path]) -> dict[str, Any]:
    """Where the model came from, with the hash of each file that was read."""
    return {"kind": kind, "path": path, "files": {f.name: f"sha256:{hash_file(f)}" for f in files}}


def kv_groups(lowered: Graph) -> list[dict[str, Any]]:
    """The lowered graph's KV groups, in order."""
    return [_kv_group(value.type) for value in lowered.inputs if isinstance(value.type, KV)]


def _kv_group(kv: KV) -> dict[str, Any]:
    block_bytes = -(-kv.bytes_per_token * kv.block // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    streams = [
        {"name": s.name, "dtype": str(s.dtype), "heads": s.heads, "head_size": s.head_size}
        for s in kv.streams
    ]
    return {
        "layers": kv.layers,
        "window": kv.window,
        "block": kv.block,
        "bytes_per_token": kv.bytes_per_token,
        "block_bytes": block_bytes,
        "streams": streams,
    }


def tokenizer_entry(files: Mapping[str, Any]) -> dict[str, Any]:
    return {"present": bool(files), "files": [f"tokenizer/{name}" for name in files]}
