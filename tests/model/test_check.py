"""octavo compile --check names the pass that changes a result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import compiler
import compiler.forward
from compiler.check import CheckError
from compiler.pipeline import pipeline
from ir.graph import Graph
from passes.base import Pass, Result
from tests.model import tiny


@dataclass(frozen=True)
class BrokenNorm(Pass):
    """Wrong on purpose: changes the epsilon of the last norm."""

    def run(self, graph: Graph) -> Result:
        index = max(i for i, op in enumerate(graph.ops) if op.kind == "rms_norm")
        ops = list(graph.ops)
        ops[index] = ops[index].with_attrs(eps=0.5)
        return Result(replace(graph, ops=tuple(ops)), 1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("llama") / "checkpoint")


def test_check_passes_on_a_sound_pipeline(checkpoint: Path, tmp_path: Path) -> None:
    tiny.compiled(checkpoint, tmp_path / "m.octavo", check=True)


@pytest.mark.parametrize("after", ["fuse_norm", "page_kv", "fuse_epilogue"])
def test_check_names_a_broken_pass_and_the_op(
    after: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> tuple[Pass, ...]:
        passes = list(pipeline(*args, **options))  # type: ignore[arg-type]
        index = next(i for i, each in enumerate(passes) if each.name == after)
        return (*passes[: index + 1], BrokenNorm(), *passes[index + 1 :])

    monkeypatch.setattr(compiler.forward, "pipeline", broken)
    with pytest.raises(CheckError, match=r"broken_norm.*\n.*rms_norm.*model\.norm") as caught:
        compiler.compile(checkpoint, tmp_path / "m.octavo", check=True, isa=tiny.ISA)
    assert caught.value.pass_name == "broken_norm"
    assert not (tmp_path / "m.octavo").exists()
