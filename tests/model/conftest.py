"""The demo model, compiled once for each state of the compiler's source, and transformers' own copy of it.

Both artifacts are compiled in measured processes: how much memory and time that took is kept beside them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from codegen import cpp
from tests.codegen.harness import levels
from tests.model.measured import Measured, compile_measured

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


@contextmanager
def made_once(name: str) -> Iterator[Path]:
    """Where `name` lies or is made by one of the processes of a run; others that want it wait meanwhile."""
    path = CACHE / compiler_key() / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with _locked("folder"):
        if not path.parent.is_dir():
            for old in sorted(CACHE.glob("*"), key=lambda p: p.stat().st_mtime)[:-2]:  # of earlier compilers
                shutil.rmtree(old)
            path.parent.mkdir()
    with _locked(name):
        yield path


@contextmanager
def _locked(name: str) -> Iterator[None]:
    with (CACHE.parent / f"tests.{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiled(source: Path, dtype: str, *isa: str) -> Path:
    """The artifact of a checkpoint for ISA levels, or for all."""
    with made_once(f"{source.stem}.{dtype}.octavo") as out:
        if not _measurement(out).is_file():
            shutil.rmtree(out, ignore_errors=True)
            _measurement(out).write_text(json.dumps(asdict(compile_measured(source, out, dtype, isa))))
    return out


def _measurement(artifact: Path) -> Path:
    return artifact.with_suffix(".json")


def measured(artifact: Path) -> Measured:
    """What compiling one of the demo model's artifacts took."""
    return Measured(**json.loads(_measurement(artifact).read_text()))


@pytest.fixture(scope="session")
def demo_directory(demo_gguf: Path) -> Path:
    """The demo model as a Hugging Face directory of float32 safetensors, as transformers reads the file."""
    with made_once("smollm2") as directory:
        if not directory.is_dir():
            model = _read_model(demo_gguf.parent, gguf_file=demo_gguf.name)
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(directory.with_suffix(".part"))
            directory.with_suffix(".part").rename(directory)
    return directory


@pytest.fixture(scope="session")
def demo_f32(demo_gguf: Path) -> Path:
    """The demo model's artifact at f32, for this machine, compiled from the GGUF."""
    return compiled(demo_gguf, "f32", best_level("f32"))


@pytest.fixture(scope="session")
def demo_bf16(demo_directory: Path) -> Path:
    """The demo model's artifact at bf16, for this machine, compiled from a Hugging Face directory."""
    return compiled(demo_directory, "bf16", best_level("bf16"))


@pytest.fixture(scope="session")
def reference_model(demo_directory: Path) -> Any:
    """transformers' model of the same file, float32."""
    return _read_model(demo_directory)


def _read_model(directory: Path, **options: Any) -> Any:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    return model.eval()


@pytest.fixture(scope="session")
def greedy_cases() -> list[dict[str, Any]]:
    """18 prompts with 64 greedy tokens and the margin (best minus second logit) of each step.

    tests/data/smollm2_greedy.json: transformers' generate, float32, on the same GGUF dequantised.
    """
    return json.loads((ROOT / "tests" / "data" / "smollm2_greedy.json").read_text())["cases"]
