"""Writes small artifacts by the text of docs/artifact.md alone, without the compiler."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np


def chunked_sha256(data: bytes) -> str:
    chunks = [data[i : i + (8 << 20)] for i in range(0, len(data), 8 << 20)]
    return hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()


def safetensors(tensors: dict[str, np.ndarray], pad: int = 64) -> bytes:
    """The format's own layout; `pad` aligns the start of the data."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % pad)
    return len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values())


def manifest(files: dict[str, bytes], **changes: Any) -> dict[str, Any]:
    streams = [{"name": n, "dtype": "f32", "heads": 1, "head_size": 8} for n in "kv"]
    group = {"layers": 2, "window": None, "block": 16, "bytes_per_token": 128, "block_bytes": 2048}
    kernel = {"isa": "any", "arch": os.uname().machine, "features": [], "sources": [], "flags": []}
    kernel["file"] = "targets/cpu/kernels/forward.any.so"
    target = {
        "graph": "targets/cpu/graph.ir",
        "plan": "targets/cpu/plan.json",
        "weights": "weights/cpu.safetensors",
        "weight_order": ["w0", "w1"],
        "kernels": [kernel],
    }
    model = {"dtype": "f32", "vocab_size": 97, "max_context": 256, "bos_token_id": 1, "eos_token_ids": [2]}
    whole = {
        "format": "octavo",
        "version": 2,
        "name": "tiny",
        "made_by": {},
        "source": {"kind": "module", "path": "é"},
        "model": model | {"frozen": {}},
        "tokenizer": {"present": False, "files": []},
        "kv_groups": [group | {"streams": streams}],
        "targets": {"cpu": target},
        "files": {name: {"bytes": len(data), "sha256": chunked_sha256(data)} for name, data in files.items()},
    }
    return whole | changes


def sign(raw: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in raw.items() if k != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return rest | {"digest": "sha256:" + hashlib.sha256(text.encode()).hexdigest()}


WEIGHTS = {"w1": np.arange(48, dtype=np.float32).reshape(3, 16), "w0": np.arange(5, dtype=np.float32)}


def default_files(library: bytes = b"not a library") -> dict[str, bytes]:
    plan = {"arena": {"T": 64, "Q": 0, "R": 32, "": 256}, "max_logits_width": 97}
    return {
        "targets/cpu/graph.ir": b"graph @tiny() {}\n",
        "targets/cpu/plan.json": json.dumps(plan).encode(),
        "targets/cpu/kernels/forward.any.so": library,
        "weights/cpu.safetensors": safetensors(WEIGHTS),
    }


DRAFT = "targets/cpu/draft"


def with_draft(files: dict[str, bytes], **changes: Any) -> dict[str, Any]:
    """Adds the files of a draft of the CPU's target, and gives the manifest. changes: in its entry there."""
    files |= {f"{DRAFT}/{name}": files[f"targets/cpu/{name}"] for name in ("graph.ir", "plan.json")}
    files[f"{DRAFT}/kernels/forward.any.so"] = files["targets/cpu/kernels/forward.any.so"]
    files[f"{DRAFT}/weights.safetensors"] = safetensors(WEIGHTS)
    whole = manifest(files)
    target = whole["targets"]["cpu"]
    entry = json.loads(json.dumps(target).replace("targets/cpu", DRAFT))
    target["draft"] = entry | {"weights": f"{DRAFT}/weights.safetensors", "quantization": None} | changes
    return whole


FOLDER = "targets/cuda-sm_90"


def with_gpu(files: dict[str, bytes], weights: str | None = "weights/gpu.safetensors") -> dict[str, Any]:
    """Adds the files of a target cuda:sm_90, and gives the manifest of both targets."""
    named = {
        "graph": "graph.ir",
        "plan": "plan.json",
        "kernels": "kernels.json",
        "source": "kernels/kernels.py",
    }
    files |= {f"{FOLDER}/{name}": b"content of " + name.encode() for name in named.values()}
    files[f"{FOLDER}/kernels/norm.0.cubin"] = b"not a binary"
    if weights is not None:
        files[weights] = safetensors(WEIGHTS)
    whole = manifest(files)
    whole["targets"]["cuda:sm_90"] = {
        "backend": "cuda",
        "arch": "sm_90",
        **{field: f"{FOLDER}/{name}" for field, name in named.items()},
        "weights": weights,
        "weight_order": ["w1", "w0"],
        "invariant": False,
        "built_by": {"triton": "3.9.0"},
    }
    return whole


def write(root: Path, files: dict[str, bytes] | None = None, raw: dict[str, Any] | None = None) -> Path:
    files = default_files() if files is None else files
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "manifest.json").write_text(json.dumps(sign(raw or manifest(files)), indent=1))
    return root
