"""`octavo inspect --kernels` on an artifact of two targets: resources, and costs and bounds by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codegen.cache import default_cache
from codegen.triton.build import BuiltKernel, kernels_json
from compiler import manifest
from compiler.artifact import ArtifactWriter
from compiler.cli.main import main
from compiler.targets import CpuTarget, GpuTarget, find_targets
from tests.codegen.harness import lower
from tests.codegen.test_forward import HEADS, D, G, H, I, V, graph

BANDWIDTH = 3.35e12  # of cuda:sm_90
TAKEN: dict[str, Any] = {"registers": 40, "spills": 0, "occupancy": 0.75, "matrix": {"mma": 2}}
LAYERS = 2
QKV = (HEADS + 2 * G) * D


class Unbuilt(GpuTarget):
    """With made-up resources in place of binaries."""

    def build(self, writer: ArtifactWriter, *_: Any) -> None:
        built = [BuiltKernel(k, k.function, None, 1024, **TAKEN) for k in self.generated.kernels]
        writer.write(f"{self.folder}/kernels.json", json.dumps(kernels_json(built, self._device)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gpu = find_targets("cuda:sm_90")[0]
    gpu.__class__ = Unbuilt
    with ArtifactWriter(tmp_path_factory.mktemp("inspect") / "model.octavo") as writer:
        entries: dict[str, Any] = {}
        for target in (CpuTarget(["baseline"]), gpu):
            lowered = lower(graph(), target.device)
            target.write_graph(lowered, writer)
            target.generate(lowered, writer)
            target.build(writer, lambda done, total: None, default_cache())
            entries[target.name] = target.entry(weights=False)
        model = {"dtype": "f32", "vocab_size": V, "max_context": 1024, "bos_token_id": None}
        writer.seal({
            "name": "test", "made_by": {"octavo": "test"},
            "source": {"kind": "graph", "path": "test", "files": {}},
            "model": {**model, "eos_token_ids": [], "frozen": {}},
            "tokenizer": manifest.tokenizer_entry({}), "kv_groups": manifest.kv_groups(lower(graph())),
            "targets": entries,
        })  # fmt: skip
        return writer.publish()


def inspect(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    with pytest.raises(SystemExit) as end:
        main(["inspect", *map(str, args)])
    assert end.value.code in (0, None), capsys.readouterr().err
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *args: object) -> list[dict[str, Any]]:
    return json.loads(inspect(capsys, *args, "--kernels", "--json"))


def test_a_step_by_hand(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = ("--target", "cuda:sm_90", "--requests", 3, "--context", 100, "--tokens", 1)
    found = [r for r in rows(capsys, engine, *step) if r["step"] == "step"]
    qkv = next(r for r in found if r["op"] == f"linear {H} -> {QKV}")
    num_bytes = LAYERS * 4 * (QKV * H + QKV + 3 * H + 3 * QKV)
    assert (qkv["launches"], qkv["bytes"], qkv["operations"]) == (LAYERS, num_bytes, LAYERS * 2 * 3 * QKV * H)
    assert (qkv["bound"], qkv["bound_us"]) == ("read", round(num_bytes / BANDWIDTH * 1e6, 3))
    assert {name: qkv[name] for name in TAKEN} == TAKEN and qkv["shared_bytes"] == 1024
    up = next(r for r in found if r["op"] == f"linear {H} -> {2 * I} gated")
    assert up["bytes"] == LAYERS * 4 * (2 * I * H + 3 * H + 3 * I)
    full = next(r for r in found if r["op"] == "paged_attention" and r["bytes"])
    windowed = next(r for r in found if r["op"] == "paged_attention window 20" and r["bytes"])
    q_and_out = 3 * 2 * HEADS * D * 4
    assert (full["launches"], full["bytes"]) == (1, 3 * 101 * 2 * G * D * 4 + q_and_out)
    assert windowed["bytes"] == 3 * 20 * 2 * G * D * 4 + q_and_out


def test_a_decode_and_a_prefill_step_by_default(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, engine, "--target", "cuda:sm_90")
    heads = {r["step"]: r["operations"] for r in found if r["op"] == f"linear {H} -> {V}"}
    assert heads == {"decode": 2 * 16 * V * H, "prefill": 2 * V * H}
    kinds = {step: {r["name"].split(".")[0] for r in found if r["step"] == step} for step in heads}
    assert "attention_prefill" in kinds["prefill"] - kinds["decode"]
    names = {r["name"] for r in found}
    listed = json.loads((engine / "targets/cuda-sm_90/kernels.json").read_text())["kernels"]
    assert names == {kernel["name"] for kernel in listed}


def test_all_targets_without_one(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, engine)
    assert {r["target"] for r in found} == {"cpu", "cuda:sm_90"}
    cpu = [r for r in found if r["target"] == "cpu"]
    assert all(r["registers"] is None and r["bound"] is None and r["bytes"] > 0 for r in cpu)
    name = f"linear {H} -> {QKV}"
    counted = {r["target"]: r["operations"] for r in found if (r["op"], r["step"]) == (name, "prefill")}
    assert counted["cpu"] == counted["cuda:sm_90"] == LAYERS * 2 * 1024 * QKV * H


def test_tables(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspect(capsys, engine, "--kernels")
    assert "cuda:sm_90, decode, at least" in shown and "cpu, prefill" in shown
    (line,) = [x for x in shown.splitlines() if "embed.0" in x and " 75% " in x and "2 mma" in x][:1]
    assert "read" in line


def test_what_an_artifact_holds_names_its_targets(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cuda:sm_90: built by triton" in inspect(capsys, engine)
    facts = json.loads(inspect(capsys, engine, "--json"))
    assert set(facts["targets"]) == {"cpu", "cuda:sm_90"}
    for target, kind in (("cpu", "cpu"), ("cuda:sm_90", "gpu")):
        text = inspect(capsys, engine, "--ir", "graph", "--target", target)
        assert text == (engine / "targets" / target.replace(":", "-") / "graph.ir").read_text(), kind


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kernels", "--target", "cuda:sm_80"), "no target 'cuda:sm_80' (built: cpu, cuda:sm_90)"),
        (("--kernels", "--context", 1024), "the model's context is 1024"),
    ],
)
def test_what_cannot_be_shown(
    engine: Path, capsys: pytest.CaptureFixture[str], args: tuple[object, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["inspect", str(engine), *map(str, args)])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_shapes_alone_are_called_so(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none: to inspect and to measure, not to load" in inspect(capsys, engine)
