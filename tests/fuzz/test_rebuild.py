"""octavo rebuild: the same logits, bit for bit, and none of the artifact's own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from codegen.cache import default_cache
from codegen.cpp import find_level
from compiler import manifest
from compiler.artifact import ArtifactWriter
from compiler.errors import CompileError
from compiler.rebuild import rebuild
from compiler.targets import CpuTarget
from compiler.trial import compiled_logits
from compiler.weights import ArraySource
from ir.graph import Graph, tensor_of
from ir.text import parse, print_graph
from passes.group_pointwise import GroupPointwise
from passes.plan_memory import PlanMemory
from runtime import Artifact
from tests.codegen.harness import levels
from tests.runtime import made

LEVEL = find_level(levels()[-1]).name
CONTEXT = 64


def lowered() -> Graph:
    graph = parse((Path(__file__).parent / "graphs/paged.ir").read_text())
    return PlanMemory(device="cpu").run(GroupPointwise().run(graph).graph).graph


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of attention with random weights."""
    rng, graph, target = np.random.default_rng(), lowered(), CpuTarget([LEVEL])
    types = {w.name: tensor_of(w) for w in graph.weights}
    arrays = {name: rng.standard_normal(t.shape, np.float32) for name, t in types.items()}
    with ArtifactWriter(tmp_path_factory.mktemp("rebuild") / "a.octavo") as writer:
        target.write_graph(graph, writer)
        target.generate(graph, writer)
        target.pack([target], ArraySource(arrays), writer.path(target.weights), lambda done, total: None)
        target.build(writer, lambda done, total: None, default_cache())
        writer.seal(described(target, graph))
        return writer.publish()


def described(target: CpuTarget, graph: Graph) -> dict[str, Any]:
    model = {"dtype": "f32", "vocab_size": 97, "max_context": CONTEXT, "frozen": {}}
    return {
        "name": "layer",
        "made_by": {},
        "source": {"kind": "module", "path": "layer"},
        "model": model | {"bos_token_id": 1, "eos_token_ids": [2]},
        "tokenizer": {"present": False, "files": []},
        "kv_groups": manifest.kv_groups(graph),
        "targets": {"cpu": target.entry(weights=True)},
    }


def copied(artifact: Path, out: Path, **changes: Callable[[bytes], bytes]) -> Path:
    """The artifact with some files changed, signed again; changes by the end of a file's name."""
    raw: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    files = {name: (artifact / name).read_bytes() for name in raw["files"]}
    for end, change in changes.items():
        for name in files:
            if name.endswith(end.replace("_", ".")):
                files[name] = change(files[name])
    raw["files"] = {n: {"bytes": len(d), "sha256": made.chunked_sha256(d)} for n, d in files.items()}
    return made.write(out, files, raw)


def test_what_is_made_again_gives_the_same_bits_and_runs_no_old_code(artifact: Path, tmp_path: Path) -> None:
    wanted = compiled_logits(Artifact.open(artifact), "cpu")
    bad = copied(
        artifact,
        tmp_path / "bad.octavo",
        so=lambda data: b"not a library",
        cpp=lambda data: b"#error bad\n",
        _h=lambda data: b"#error bad\n",
        plan_json=lambda data: b'{"arena": {"": 0}, "max_logits_width": 1}',
    )
    with pytest.raises((runtime.OctavoError, OSError)):
        compiled_logits(Artifact.open(bad), "cpu")
    again = rebuild(bad, tmp_path / "again.octavo", isa=[LEVEL])
    assert np.array_equal(compiled_logits(Artifact.open(again), "cpu"), wanted)
    assert Artifact.open(again).manifest.raw["made_by"]["rebuilt_from"] == Artifact.open(bad).manifest.digest


def replaced(*pairs: tuple[str, str]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        text = data.decode()
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        return text.encode()

    return change


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("f32[97,16], %ids", "f32[90,16], %ids")], "an index may leave a table of 90 rows"),
        ([("%ids: i32[T]", "%system: i32[T]"), ("%ids {", "%system {")], "a step has no 'system'"),
        ([("[97,16]", "[98,16]"), ("[Q,97]", "[Q,98]")], "logits of 98 tokens"),
        ([("block 16", "block 1048576")], "blocks of"),
        ([("rms_norm %x", "system %x")], "there is no op"),
        ([("return %y", "return")], "logits of None"),
        ([("graph", "import os; graph")], "expected 'graph'"),
        ([("@q: f32[16,16]", "@q: f32[16,1600]")], "linear"),
    ],
)
def test_a_graph_that_could_leave_its_arrays_is_refused(
    artifact: Path, tmp_path: Path, pairs: list[tuple[str, str]], message: str
) -> None:
    bad = copied(artifact, tmp_path / "bad.octavo", graph_ir=replaced(*pairs))
    with pytest.raises(CompileError, match=message):
        rebuild(bad, tmp_path / "again.octavo", isa=[LEVEL])
    assert [p.name for p in tmp_path.iterdir()] == ["bad.octavo"]


def with_draft(artifact: Path, out: Path, change: Callable[[bytes], bytes] = lambda data: data) -> Path:
    """The artifact with itself as its draft. change: of the draft's graph."""
    raw: dict[str, Any] = json.loads((artifact / "manifest.json").read_text())
    files = {name: (artifact / name).read_bytes() for name in raw["files"]}
    folder, weights = "targets/cpu", "targets/cpu/draft/weights.safetensors"
    for name in [name for name in files if name.startswith(folder)]:
        files[name.replace(folder, f"{folder}/draft")] = files[name]
    files[f"{folder}/draft/graph.ir"] = change(files[f"{folder}/graph.ir"])
    files[weights] = files["weights/cpu.safetensors"]
    target = raw["targets"]["cpu"]
    draft = json.loads(json.dumps(target).replace(folder, f"{folder}/draft")) | {"weights": weights}
    target["draft"] = draft | {"quantization": {"weights": "int4"}}
    raw["files"] = {n: {"bytes": len(d), "sha256": made.chunked_sha256(d)} for n, d in files.items()}
    return made.write(out, files, raw)


def test_a_draft_is_made_again_too(artifact: Path, tmp_path: Path) -> None:
    wanted = compiled_logits(Artifact.open(artifact), "cpu")
    given = with_draft(artifact, tmp_path / "a.octavo")
    again = Artifact.open(rebuild(given, tmp_path / "again.octavo", isa=[LEVEL]))
    assert np.array_equal(compiled_logits(again, "draft"), wanted)
    assert again.manifest.raw["targets"]["cpu"]["draft"]["quantization"] == {"weights": "int4"}
    assert again.draft().weights == "targets/cpu/draft/weights.safetensors"


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("block 16", "block 32"), "its KV blocks are not its target's"),
        (("return %y", "return"), "logits of"),
    ],
)
def test_a_draft_that_could_leave_the_targets_blocks_is_refused(
    artifact: Path, tmp_path: Path, pair: tuple[str, str], message: str
) -> None:
    bad = with_draft(artifact, tmp_path / "bad.octavo", replaced(pair))
    with pytest.raises(CompileError, match=f"(?s)draft/graph.ir.*{message}"):
        rebuild(bad, tmp_path / "again.octavo", isa=[LEVEL])


def test_buffers_are_planned_again(artifact: Path, tmp_path: Path) -> None:
    """Those of the artifact's graph could overlap, or be too small."""
    text = print_graph(lowered())
    assert "at=[0" in text
    bad = copied(
        artifact, tmp_path / "bad.octavo", graph_ir=replaced(("at=[1", "at=[0")) if "at=[1" in text else bytes
    )
    again = rebuild(bad, tmp_path / "again.octavo", isa=[LEVEL])
    assert np.array_equal(
        compiled_logits(Artifact.open(again), "cpu"), compiled_logits(Artifact.open(artifact), "cpu")
    )


def test_it_replaces_neither_itself_nor_takes_another_digest(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="replace what it reads"):
        rebuild(artifact, artifact)
    with pytest.raises(runtime.ArtifactError, match="not the given"):
        rebuild(artifact, tmp_path / "x.octavo", digest="0" * 64)
