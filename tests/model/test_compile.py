"""Compiling the demo model: memory, time, stages and the checker."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import compiler
from ir.text import parse, print_graph
from tests.model.conftest import measured
from tests.model.measured import MEGABYTE


@pytest.mark.parametrize("artifact", ["demo_f32", "demo_bf16"])  # of a GGUF, of a Hugging Face directory
def test_a_compile_takes_little_memory_and_time(artifact: str, request: pytest.FixtureRequest) -> None:
    taken = measured(request.getfixturevalue(artifact))
    print(f"{artifact}: {taken}")
    largest_tensor = 49152 * 576 * 4
    assert taken.peak_bytes < largest_tensor + 300 * MEGABYTE
    assert taken.cpu_s < 70  # of CPU time, which other load on the machine does not stretch much


def first_layers(directory: Path, folder: Path, count: int) -> Path:
    """The demo model without its other layers, whose tensors stay unused."""
    folder.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    os.link(directory / "model.safetensors", folder / "model.safetensors")
    return folder


def test_the_checker_passes_on_the_demo_models_first_layers_and_every_stage_parses_back_to_the_same_text(
    demo_directory: Path, tmp_path: Path
) -> None:
    source = first_layers(demo_directory, tmp_path / "source", 3)
    compiler.compile(source, tmp_path / "m.octavo", check=True, dump_ir=tmp_path / "ir", isa=["v3"])
    dumps = sorted((tmp_path / "ir").glob("*.ir"))
    assert len(dumps) > 10
    for path in dumps:
        assert print_graph(parse(path.read_text())) == path.read_text(), path.name
