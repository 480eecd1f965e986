"""Artifacts of several targets: what a compile puts in them for GPUs, and what a machine without one says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import compiler
import runtime
from codegen import triton
from compiler import trial
from compiler.artifact import ArtifactWriter
from compiler.check import CheckError
from compiler.cli.main import main
from compiler.driver import Compile
from compiler.errors import CompileError
from compiler.options import Options
from compiler.progress import Progress
from compiler.targets import TARGETS, find_targets
from runtime.artifact import Artifact
from runtime.errors import ArtifactError, ResourceError
from runtime.gpu import targets
from runtime.gpu.vendor import Unavailable
from runtime.weights import Weights
from tests.codegen.harness import Arrays, arg, lower, paged_builder, random_weights, weight
from tests.model import tiny

GPUS = ["cuda:sm_90", "triton-interpret"]


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.begun: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stage(self, name: str) -> None:
        self.begun.append(name)


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Also on a machine that has one."""

    def find(backend: str) -> None:
        raise Unavailable(f"{backend} was not found")

    with pytest.MonkeyPatch.context() as patch:
        for module in (trial, targets):
            patch.setattr(module, "find_api", find)
        yield


@pytest.fixture(scope="module")
def notes() -> Notes:
    return Notes()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, notes: Notes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a GPU that is not here and for the interpreter, every pass and the result checked."""
    folder = tmp_path_factory.mktemp("engine")
    return compiler.compile(
        checkpoint, folder / "m.octavo", target=GPUS, dtype="f32", check=True, invariant=True, progress=notes,
        dump_ir=folder / "ir",
    )  # fmt: skip


def test_an_artifact_describes_its_targets(engine: Path) -> None:
    manifest = Artifact.open(engine).manifest
    assert list(manifest.targets) == GPUS
    cuda, interpreted = (manifest.raw["targets"][name] for name in GPUS)
    assert (cuda["backend"], cuda["arch"], cuda["invariant"]) == ("cuda", "sm_90", True)
    assert cuda["built_by"]["triton"].startswith("3.") and cuda["built_by"]["ptxas"]
    assert (interpreted["backend"], interpreted["built_by"]) == ("interpret", {})
    assert cuda["weights"] == interpreted["weights"] == "weights/gpu.safetensors"
    for fields in (cuda, interpreted):
        assert {fields[name] for name in ("graph", "plan", "kernels", "source", "weights")} <= set(
            manifest.files
        )
    assert manifest.raw["made_by"].keys() == {"octavo"}  # no C++ compiler was used


def test_every_kernel_has_its_binary(engine: Path) -> None:
    artifact = Artifact.open(engine)
    for name, has_binary in zip(GPUS, (True, False), strict=True):
        folder = f"targets/{name.replace(':', '-')}"
        kernels = json.loads(artifact.read(f"{folder}/kernels.json"))["kernels"]
        plan = json.loads(artifact.read(f"{folder}/plan.json"))
        launched = {launch["kernel"] for launch in _launches(plan)}
        assert launched == {kernel["name"] for kernel in kernels}
        for kernel in kernels:
            assert (kernel["file"] is not None) == has_binary
            if has_binary:
                assert artifact.read(f"{folder}/{kernel['file']}")[:4] == b"\x7fELF"


def _launches(plan: dict[str, Any]) -> list[dict[str, Any]]:
    entries = [entry for section in plan["sections"].values() for entry in section]
    return [launch for entry in entries for case in entry["cases"] for launch in case["launches"]]


def test_what_this_machine_cannot_run_is_said(engine: Path, notes: Notes) -> None:
    assert engine.is_dir()
    (said,) = [note for note in notes.notes if "not run" in note]
    assert said.startswith("cuda:sm_90: not run: there is no such GPU here: cuda was not found")
    assert {f"{step} {name}" for step in ("generate", "build", "verify") for name in GPUS} <= set(notes.begun)


def test_loading_without_the_device_says_what_it_needs(engine: Path) -> None:
    with pytest.raises(ResourceError) as caught:
        runtime.load(engine, target="cuda:sm_90")
    said = str(caught.value)
    assert "needs an NVIDIA GPU of compute capability 9.0 and its driver" in said and "\n" not in said
    with pytest.raises(ArtifactError, match=r"no target 'cpu' \(built: cuda:sm_90, triton-interpret\)"):
        runtime.load(engine, target="cpu")


def test_profile_needs_the_cpus_kernels(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["profile", str(engine)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "octavo inspect --kernels" in said and said.count("\n") == 1


def test_bench_claims_no_shares_where_limits_are_not_measured(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ("--prompt-tokens", "4", "--new-tokens", "2", "--repeats", "1", "--json")
    with pytest.raises(SystemExit) as end:
        main(["bench", str(engine), "--target", "triton-interpret", *step])
    assert end.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "triton-interpret" and found["decode_tokens_per_s"] > 0
    assert not {"bandwidth_share", "peak_share", "read_bytes_per_s"} & found.keys()


def test_a_binary_that_was_changed_is_refused(engine: Path) -> None:
    binary = next((engine / "targets/cuda-sm_90/kernels").glob("*.cubin"))
    content = binary.read_bytes()
    try:
        binary.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ArtifactError, match="SHA-256") as caught:
            runtime.load(engine, target="cuda:sm_90", verify="fast")
        assert binary.name in str(caught.value)
    finally:
        binary.write_bytes(content)


def test_every_stage_is_kept_once(engine: Path) -> None:
    files = sorted(name for name in Artifact.open(engine).manifest.files if name.startswith("stages/"))
    names = [Path(name).stem.partition("-")[2] for name in files]
    assert names[0] == "imported" and names[-1] == "plan_memory" and names.count("plan_memory") == 1
    assert [path.name for path in sorted((engine.parent / "ir").iterdir())] == [Path(f).name for f in files]


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("tl.sqrt(", "the compiled forward for triton-interpret gives logits that differ by"),
        ("tl.no_such_thing(", "the compiled forward for triton-interpret fails: rms_norm.0: "),
    ],
)
def test_a_wrong_kernel_is_noticed(
    instead: str, said: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = triton.generate

    def wrong(*args: Any, **options: Any) -> triton.Generated:
        made = generate(*args, **options)
        assert "tl.rsqrt(" in made.source
        return replace(made, source=made.source.replace("tl.rsqrt(", instead))

    monkeypatch.setattr(triton, "generate", wrong)
    with pytest.raises((CheckError, CompileError), match=re.escape(said)):
        compiler.compile(checkpoint, tmp_path / "m.octavo", target="triton-interpret", check=True)
    assert not list(tmp_path.iterdir())


def test_targets_share_a_file_of_weights(tmp_path: Path) -> None:
    """Each array is there once, row after row, and each target finds its own by its order."""
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("table", 40, 24))
    first, second = (weight(name, 24, 24) for name in ("a", "b"))
    graph = lower(b.graph([b.op("linear", b.op("linear", x, first), second)]), "gpu")
    arrays = random_weights(graph, np.random.default_rng(0))
    one, other = (triton.generate(graph, triton.find_device(name)) for name in ("cuda:sm_80", "hip:gfx942"))
    other = replace(other, weights=other.weights[::-1])
    triton.pack([one, other], Arrays(arrays), tmp_path / "w", lambda done, total: None)
    stored = load_file(tmp_path / "w")
    assert {name for name in stored if not name.startswith("filler.")} == set(one.weight_order)
    for target in (one, other):
        opened = Weights(tmp_path / "w", target.weight_order)
        for name, tensor in zip(target.weight_order, opened.tensors, strict=True):
            assert np.array_equal(tensor.view(np.float32), arrays[name].ravel())
        opened.close()


@pytest.fixture(scope="module")
def shapes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with config.json alone."""
    folder = tmp_path_factory.mktemp("shapes") / "llama"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


def test_shapes_alone_are_inspected_and_not_loaded(shapes: Path, tmp_path: Path) -> None:
    out = compiler.compile(
        shapes, tmp_path / "m.octavo", target=["cpu", "triton-interpret"], weights=False, isa=tiny.ISA
    )
    artifact = Artifact.open(out)
    assert not [name for name in artifact.manifest.files if name.startswith("weights/")]
    for name, target in artifact.manifest.targets.items():
        assert target.weights is None and target.weight_order
        assert artifact.read(target.graph).startswith(b"graph @")
        with pytest.raises(
            ArtifactError, match="it has no weights: it was compiled from shapes alone"
        ) as caught:
            runtime.load(out, target=name)
        assert "\n" not in str(caught.value)


def test_the_graph_of_shapes_alone_is_the_checkpoints(shapes: Path, engine: Path, tmp_path: Path) -> None:
    out = compiler.compile(shapes, tmp_path / "m.octavo", target="triton-interpret", weights=False)
    name = "targets/triton-interpret/graph.ir"
    assert (out / name).read_text() == (engine / name).read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            dict(target=["cpu", "cuda:sm_75"]),
            f"--target cuda:sm_75: not a target. There are {', '.join(TARGETS)}",
        ),
        (dict(target=[]), "--target: none is given. There are cpu, cuda:sm_80"),
        (dict(target="cuda:sm_90", isa=["v3"]), "--isa: ISA levels are the target cpu's"),
        (dict(weights=False, check=True), "--check: it runs the model, which needs its weights"),
        (dict(isa=["v9"]), "--isa: there is no ISA level 'v9'"),
    ],
)
def test_a_wrong_option_is_refused_before_any_work(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compiler.importers.load", lambda *args, **kwargs: pytest.fail("imported"))
    with pytest.raises(CompileError) as caught:
        compiler.compile("nowhere", tmp_path / "m.octavo", **options)
    assert str(caught.value).startswith(said)
    assert not list(tmp_path.iterdir())


def test_only_a_directory_has_shapes_alone(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="nowhere: shapes alone .* are read from a directory"):
        compiler.compile("nowhere", tmp_path / "m.octavo", weights=False)


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        (["cpu"], "f32"),
        (["triton-interpret"], "f32"),
        (["cuda:sm_90"], "bf16"),
        (["cuda:sm_80", "hip:gfx942"], "bf16"),
        (["cpu", "cuda:sm_90"], "f32"),
        (["cuda:sm_90", "triton-interpret"], "f32"),
    ],
)
def test_what_linears_multiply_by_default(targets: list[str], dtype: str, tmp_path: Path) -> None:
    writer = ArtifactWriter(tmp_path / "m.octavo")
    assert Compile(writer, find_targets(targets), Options(), Progress()).dtype == dtype
    asked = Compile(writer, find_targets(targets), Options(dtype="f32"), Progress())
    assert asked.dtype == "f32"
