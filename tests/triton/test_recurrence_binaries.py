"""Binaries of recurrences, built without a device: no spills, and within shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen import triton
from codegen.cache import Cache
from codegen.triton import find_device
from codegen.triton.build import build_kernels
from tests.codegen.harness import lower
from tests.triton.test_recurrence import Case, graph

SHAPES = {
    "gated_delta": Case(32, 16, 128, 128, beta=True),
    "delta_of_channels": Case(32, 32, 128, 128, decay=128, beta=True),
    "grouped": Case(128, 8, 256, 64),
    "rates": Case(1, 1, 16, 8192, decay=8192, rates=True),
    "odd": Case(3, 1, 1021, 37, decay=1021, beta=True),
}


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_fit(tmp_path: Path, target: str, shape: str) -> None:
    device = find_device(target)
    generated = triton.generate(lower(graph(SHAPES[shape]), "gpu"), device)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kernels.py").write_text(generated.source)
    kernels = [k for k in generated.kernels if k.function == "recurrence"]
    (built,) = build_kernels(tmp_path, kernels, device, cache=Cache(tmp_path / "cache"))
    assert built.spills == 0 and built.shared_bytes <= device.shared_bytes
