"""The demo model, compiled once for each state of the compiler's source, and transformers' own copy of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import compiler
from codegen import cpp
from tests.codegen.harness import levels

ROOT = Path(__file__).parents[2]
GGUF = ROOT / "build" / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = ROOT / "build" / "tests"


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    assert GGUF.is_file(), f"{GGUF} is missing: run `make model`, which fetches it"
    return GGUF


def compiler_key() -> str:
    """A hash of the source that decides what a compile writes."""
    files = [
        p
        for d in ("ir", "passes", "codegen", "compiler")
        for s in ("py", "h", "cpp")
        for p in (ROOT / d).rglob(f"*.{s}")
    ]
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(files))).hexdigest()[:16]


def best_level(dtype: str) -> str:
    """The first ISA level, of those built for an element type, that this machine has."""
    return next(name for name in levels() if name in cpp.default_levels(bf16=dtype == "bf16"))


def compiled(source: Path, dtype: str) -> Path:
    """The artifact for this machine, which one of the run's processes compiles while the others wait."""
    out = CACHE / compiler_key() / f"{source.stem}.{dtype}.octavo"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE.parent / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "manifest.json").is_file():
            for old in sorted(CACHE.glob("*"), key=lambda p: p.stat().st_mtime)[:-2]:  # of earlier compilers
                shutil.rmtree(old)
            out.parent.mkdir(parents=True, exist_ok=True)
            compiler.compile(source, out, dtype=dtype, isa=[best_level(dtype)])
    return out


@pytest.fixture(scope="session")
def demo_f32(demo_gguf: Path) -> Path:
    """The demo model's artifact at f32."""
    return compiled(demo_gguf, "f32")


@pytest.fixture(scope="session")
def demo_bf16(demo_gguf: Path) -> Path:
    return compiled(demo_gguf, "bf16")


@pytest.fixture(scope="session")
def reference_model(demo_gguf: Path) -> Iterator[Any]:
    """transformers' model of the same file, float32."""
    import torch
    import transformers

    yield transformers.AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def greedy_cases() -> list[dict[str, Any]]:
    """18 prompts with 64 greedy tokens and the margin (best minus second logit) of each step.

    tests/data/smollm2_greedy.json: transformers' generate, float32, on the same GGUF dequantised.
    """
    return json.loads((ROOT / "tests" / "data" / "smollm2_greedy.json").read_text())["cases"]
