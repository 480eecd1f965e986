"""Compiling the demo model: memory, time, stages and the checker."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import compiler
from ir.text import parse, print_graph

MEGABYTE = 1 << 20


def run_measured(code: str, *args: str) -> tuple[int, float]:
    """A child's peak of anonymous memory, sampled, and the CPU seconds of it and its own children."""
    env = {name: value for name, value in os.environ.items() if name != "OCTAVO_CACHE"}
    env["OMP_NUM_THREADS"] = "2"
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), *args], env=env)
    peak = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, _anonymous_bytes(child.pid))
        time.sleep(0.005)
    assert status == 0
    return peak, usage.ru_utime + usage.ru_stime


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)


IMPORT_ONLY = """
    import torch, transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
"""


@functools.cache
def import_bytes() -> int:
    """What importing torch and transformers takes of memory by itself."""
    return run_measured(IMPORT_ONLY)[0]


COMPILE = """
    import sys
    import compiler
    compiler.compile(sys.argv[1], sys.argv[2], isa=sys.argv[3:] or None)
"""


@pytest.fixture(scope="module")
def demo_directory(reference_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a Hugging Face directory of float32 safetensors."""
    directory = tmp_path_factory.mktemp("checkpoint") / "smollm2"
    reference_model.hf_quantizer = None
    if hasattr(reference_model.config, "quantization_config"):
        del reference_model.config.quantization_config
    reference_model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("form", ["gguf", "huggingface"])
def test_a_compile_takes_little_memory_and_time(
    form: str, demo_gguf: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = demo_gguf if form == "gguf" else request.getfixturevalue("demo_directory")
    isa = [] if form == "gguf" else ["v3"]  # all levels once
    largest_tensor = 49152 * 576 * 4
    base = import_bytes()
    peak, seconds = run_measured(COMPILE, str(source), str(tmp_path / "m.octavo"), *isa)
    print(f"{form}: {(peak - base) / 1e6:.0f} MB above torch's {base / 1e6:.0f}, {seconds:.0f} s of CPU")
    assert peak - base < largest_tensor + 300 * MEGABYTE
    assert seconds < 90  # of CPU time, which other load on the machine does not stretch much


def test_the_checker_passes_on_the_demo_model_and_every_stage_parses_back_to_the_same_text(
    demo_gguf: Path, tmp_path: Path
) -> None:
    compiler.compile(demo_gguf, tmp_path / "m.octavo", check=True, dump_ir=tmp_path / "ir", isa=["v3"])
    dumps = sorted((tmp_path / "ir").glob("*.ir"))
    assert len(dumps) > 10
    for path in dumps:
        assert print_graph(parse(path.read_text())) == path.read_text(), path.name
