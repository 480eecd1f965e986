"""compiler/artifact.py: nothing half-written is ever seen, and hashes are those of docs/artifact.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiler import artifact
from compiler.artifact import ArtifactWriter
from compiler.errors import CompileError
from compiler.manifest import kv_groups
from ir.graph import Graph, Value
from ir.ops.recurrence import recurrence_streams
from ir.types import KV, DType, Stream


def write(out: Path, content: str = "x", force: bool = False) -> Path:
    with ArtifactWriter(out, force) as writer:
        writer.write("targets/cpu/graph.ir", content)
        writer.seal({"name": "m"})
        return writer.publish()


def test_the_manifest_lists_every_file_but_itself(tmp_path: Path) -> None:
    out = write(tmp_path / "m.octavo")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["format"] == "octavo" and manifest["version"] == 2
    assert set(manifest["files"]) == {"targets/cpu/graph.ir"}
    assert manifest["files"]["targets/cpu/graph.ir"]["bytes"] == 1


def test_an_artifact_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "m.octavo", "old")
    out = write(tmp_path / "m.octavo", "new")
    assert (out / "targets/cpu/graph.ir").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["m.octavo"]


def test_a_failed_compile_leaves_the_old_artifact(tmp_path: Path) -> None:
    write(tmp_path / "m.octavo", "old")
    with pytest.raises(KeyboardInterrupt):
        with ArtifactWriter(tmp_path / "m.octavo") as writer:
            writer.write("targets/cpu/graph.ir", "half")
            raise KeyboardInterrupt
    assert (tmp_path / "m.octavo/targets/cpu/graph.ir").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.octavo"]


def test_a_killed_compile_leaves_no_artifact_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from compiler.artifact import ArtifactWriter\n"
        "with ArtifactWriter(Path(sys.argv[1])) as w:\n"
        "    w.write('weights/cpu.safetensors', 'half'); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.octavo")], cwd=root)
    assert not (tmp_path / "m.octavo").exists()
    assert len(list(tmp_path.iterdir())) == 1
    write(tmp_path / "m.octavo")
    assert [p.name for p in tmp_path.iterdir()] == ["m.octavo"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_appears_while_compiling_is_not_overwritten(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(artifact, "_exchange", lambda first, second: False)
    out = tmp_path / "m[1]*.octavo"
    write(out, "first")
    with ArtifactWriter(out) as one, ArtifactWriter(out) as other:  # at once, in one process
        for writer, content in ((one, "one"), (other, "other")):
            writer.write("targets/cpu/graph.ir", content)
            writer.seal({"name": "m"})
            writer.publish()
            assert (out / "targets/cpu/graph.ir").read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == [out.name]
    with pytest.raises(CompileError, match="not an engine artifact"):
        with ArtifactWriter(tmp_path / "n.octavo") as writer:
            writer.seal({"name": "n"})
            (tmp_path / "n.octavo").mkdir()
            (tmp_path / "n.octavo/thesis.txt").write_text("years")
            writer.publish()
    assert (tmp_path / "n.octavo/thesis.txt").read_text() == "years"


def test_a_manifest_that_nests_too_deep_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/manifest.json").write_text("[" * 100_000)
    with pytest.raises(CompileError, match="not an engine artifact"):
        write(tmp_path / "m")


@pytest.mark.parametrize("kind", ["directory", "file", "symlink"])
def test_what_is_no_artifact_is_not_overwritten(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "precious"
    if kind == "directory":
        out.mkdir()
        (out / "thesis.txt").write_text("years")
    elif kind == "file":
        out.write_text("years")
    else:
        os.symlink("/", out)
    with pytest.raises(CompileError, match=r"precious: exists and is not.*-o"):
        write(out)
    assert kind != "directory" or (out / "thesis.txt").read_text() == "years"


def test_force_replaces_a_directory(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/other.txt").write_text("")
    out = write(tmp_path / "m", force=True)
    assert not (out / "other.txt").exists()


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="nowhere: there is no such directory"):
        write(tmp_path / "nowhere" / "m.octavo")


def test_only_an_artifact_with_a_state_needs_version_3(tmp_path: Path) -> None:
    streams = recurrence_streams((1, 4), (2, 4), 1, has_beta=False)
    kinds = {2: KV((Stream("k", DType.F32, 1, 8),), 3), 3: KV(streams, 3, state=True)}
    for version, kv in kinds.items():
        groups = kv_groups(Graph("g", {}, (Value("kv0", kv),), (), ()))
        with ArtifactWriter(tmp_path / "m.octavo") as writer:
            writer.seal({"name": "m", "kv_groups": groups})
            written = json.loads((writer.root / "manifest.json").read_text())
        assert written["version"] == version and written["kv_groups"] == groups
        assert ("state" in groups[0]) == kv.state
    # 3 layers of 16 tokens' 4 + 8 + 2 numbers of f32, and a state's 2 * 16
    assert (groups[0]["bytes_per_token"], groups[0]["block_bytes"]) == (0, 3 * 4 * (16 * 14 + 32))
    assert [stream["per"] for stream in groups[0]["streams"]] == ["token"] * 3 + ["block"]
