"""benchmarks/gpu.py up to the driver: a dry run, torch's side on the CPU, and the tables it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpubench import tables
from gpubench.workloads import TINY_WORKLOADS, Workload, tiny_config
from runtime.gpu.targets import find_api
from runtime.gpu.vendor import Unavailable

ROOT = Path(__file__).parents[2]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *args], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_dry_run_measures_every_op_and_whole_steps() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    for workload in TINY_WORKLOADS:
        assert f"| tiny | {workload.name} |" in done.stdout
        listed = done.stdout.partition(f"\ntiny, {workload.name}:")[2].split("\n\n")[1]
        for op in ("embed", "rms_norm", "linear 64 -> 128", "rope", "kv_write", "paged_attention"):
            assert f"| {op} |" in listed


def test_without_a_gpu_it_says_what_it_needs() -> None:
    for backend in ("cuda", "hip"):
        try:
            find_api(backend)
        except Unavailable:
            continue
        return  # here it would measure
    done = run()
    assert done.returncode == 1 and done.stdout == ""
    assert "needs an NVIDIA or AMD GPU" in done.stderr and len(done.stderr.splitlines()) == 1


def test_torch_does_the_same_steps(tmp_path: Path) -> None:
    import torch

    from gpubench.torch_side import Torch

    config, beside = tiny_config(tmp_path), Torch("cpu", 1, torch.float32)
    for workload in TINY_WORKLOADS:
        times = [
            beside.kernel_us("linear 64 -> 192 gated", 2 * 64 * 192 * 5, workload, config),
            beside.kernel_us("paged_attention", 0, workload, config),
            beside.step_s(config, workload),
        ]
        assert all(time is not None and time > 0 for time in times)
        assert beside.kernel_us("rope", 0, workload, config) is None


def test_a_step_has_each_requests_blocks_in_order() -> None:
    workload = Workload("mixed", 3, 20, 2)
    assert workload.shape.lens == (22, 22, 22) and workload.blocks(16) == 2
    assert [(w.cached, w.tokens) for w in workload.filling(16)] == [(0, 16), (16, 4)]


def test_a_section_of_a_document_is_replaced_alone(tmp_path: Path) -> None:
    document = tmp_path / "gpu.md"
    document.write_text("a\n<!-- kernels: begin (x) -->\nold\n<!-- kernels: end -->\nb\n")
    tables.replace_section(document, "kernels", "\\1 new\n")
    text = "a\n<!-- kernels: begin (x) -->\n\\1 new\n<!-- kernels: end -->\nb\n"
    assert document.read_text() == text
    with pytest.raises(ValueError, match="has no section measured"):
        tables.replace_section(document, "measured", "")


def test_tables_of_measurements() -> None:
    kernel = {
        "op": "linear 4 -> 8",
        "count": 2,
        "time_us": 8.0,
        "bound_us": 4.0,
        "bound": "read",
        "torch_us": 10,
    }
    step = {
        "name": "decode",
        "step_s": 2e-3,
        "torch_s": 3e-3,
        "bound_us": 1e3,
        "tokens": 16,
        "kernels": [kernel],
    }
    model = {"name": "m", "workloads": [step]}
    assert "| m | decode | 2.000 | 1.000 | 50% | 8,000 | 3.000 | 1.50 |" in tables.measured_steps([model])
    assert "| linear 4 -> 8 | 2 | 8.0 | 4.0 read | 50% | 10.0 | 1.25 |" in tables.measured_kernels(model)
