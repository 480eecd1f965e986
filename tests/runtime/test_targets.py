"""Which target load() takes on which machine, and what it says where there is none."""

from __future__ import annotations

import json
import logging
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import runtime
from compiler import trial
from compiler.trial import NotRun, check_runnable
from runtime import ArtifactError, ResourceError
from runtime.artifact import Artifact
from runtime.gpu import rebuild, targets
from runtime.gpu.kernels import parse_kernels
from runtime.gpu.targets import best, runs
from runtime.gpu.vendor import Unavailable
from runtime.manifest import GpuTarget
from runtime.targets import choose_target
from tests.runtime import made
from tests.runtime.fake_device import raw_plan

KERNEL = {
    "name": "norm.0", "function": "norm", "symbol": "norm", "signature": [["x", "*fp32"], ["rows", "i32"]],
    "constants": [["BLOCK", 16], ["EPS", 1e-5], ["KIND", "rms"], ["BIAS", False]], "aligned": ["x"],
    "num_warps": 4, "num_stages": 2, "file": "kernels/norm.0.cubin", "shared_bytes": 1024, "scratch_bytes": 0,
    "profile_scratch_bytes": 0, "registers": 32, "spills": 0,
}  # fmt: skip


class FakeApi:
    def __init__(self, arch: str) -> None:
        self.arch, self.name = arch, f"a GPU of {arch}"
        self.shared_bytes = {"sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10}.get(arch, 227 << 10)


def machine(monkeypatch: pytest.MonkeyPatch, *, triton: bool = False, **arches: str) -> None:
    """A machine with one GPU of each backend given, and no other."""

    def find(backend: str) -> FakeApi:
        if backend not in arches:
            raise Unavailable("there is none")
        return FakeApi(arches[backend])

    monkeypatch.setattr(targets, "find_api", find)
    monkeypatch.setattr(trial, "find_api", find)
    for module in (targets, rebuild):
        monkeypatch.setattr(module, "find_spec", lambda name: object() if triton else None)


def artifact(root: Path, *names: str, kernels: Any = None, cpu: bool = True) -> Artifact:
    """One with these GPU targets beside the CPU's."""
    files = made.default_files()
    raw = made.with_gpu(files)
    files[f"{made.FOLDER}/plan.json"] = json.dumps(raw_plan(1)).encode()
    listed = {"kernels": [KERNEL] if kernels is None else kernels}
    files[f"{made.FOLDER}/kernels.json"] = json.dumps(listed).encode()
    raw["files"] = made.manifest(files)["files"]
    like = raw["targets"].pop("cuda:sm_90")
    for name in names:
        backend, _, arch = name.removeprefix("triton-").partition(":")
        raw["targets"][name] = like | {"backend": backend, "arch": arch}
    if not cpu:
        del raw["targets"]["cpu"]
    return Artifact.open(made.write(root, files, raw))


@pytest.mark.parametrize(
    ("binary", "device", "fits"),
    [
        ("sm_80", "sm_80", True), ("sm_80", "sm_86", True), ("sm_80", "sm_89", True),
        ("sm_86", "sm_80", False),
        ("sm_80", "sm_90", False), ("sm_90", "sm_90", True), ("sm_90", "sm_100", False),
        ("sm_100", "sm_103", False), ("sm_100", "sm_100", True), ("sm_100", "sm_90", False),
        ("gfx942", "gfx942", True), ("gfx942", "gfx90a", False), ("gfx942", "sm_90", False),
    ],
)  # fmt: skip
def test_binaries_run_on_their_own_architecture(binary, device, fits):
    """And those of before 9.0 on later devices of their generation (CUDA programming guide)."""
    assert runs(binary, device) == fits


@pytest.mark.parametrize(
    ("names", "here", "chosen"),
    [
        (["cuda:sm_80", "cuda:sm_90"], {"cuda": "sm_90"}, "cuda:sm_90"),
        (["cuda:sm_80", "cuda:sm_86"], {"cuda": "sm_86"}, "cuda:sm_86"),
        (["cuda:sm_80", "cuda:sm_90"], {"cuda": "sm_89"}, "cuda:sm_80"),
        (["cuda:sm_80", "hip:gfx942"], {"hip": "gfx942"}, "hip:gfx942"),
        (["cuda:sm_80", "cuda:sm_90"], {"cuda": "sm_100"}, "cpu"),
        (["cuda:sm_90"], {"hip": "gfx942"}, "cpu"),
        (["cuda:sm_90"], {}, "cpu"),
        (["triton-interpret"], {"cuda": "sm_90"}, "cpu"),
        ([], {"cuda": "sm_90"}, "cpu"),
    ],
)
def test_the_best_target_is_chosen(tmp_path, monkeypatch, names, here, chosen):
    machine(monkeypatch, **here)
    assert choose_target(artifact(tmp_path, *names)) == chosen


def test_a_gpu_that_needs_a_rebuild_is_chosen_where_that_can_be_done(tmp_path, monkeypatch):
    machine(monkeypatch, triton=True, cuda="sm_100")
    assert choose_target(artifact(tmp_path / "a", "hip:gfx942", "cuda:sm_90")) == "cuda:sm_90"
    assert choose_target(artifact(tmp_path / "b", "hip:gfx942")) == "cpu"


LARGE = [KERNEL, KERNEL | {"name": "norm.1", "shared_bytes": (99 << 10) + 1}]


def test_a_gpu_with_less_shared_memory_than_kernels_take_needs_a_rebuild(tmp_path, monkeypatch):
    machine(monkeypatch, cuda="sm_86")
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_80", kernels=LARGE)
    assert choose_target(found) == "cpu"
    with pytest.raises(ArtifactError, match="no binaries for a GPU of sm_86 .*, and Triton is not here"):
        runtime.load(found.root, target="cuda:sm_80")
    with pytest.raises(NotRun, match="the GPU here is sm_86"):
        check_runnable(found, "cuda:sm_80")
    machine(monkeypatch, triton=True, cuda="sm_86")
    monkeypatch.setattr(targets, "DriverDevice", FakeDriverDevice)
    commands = builds(monkeypatch, tmp_path / "cache")
    assert choose_target(found) == "cuda:sm_80"
    target = found.target("cuda:sm_80")
    assert isinstance(target, GpuTarget)
    _, compiled = targets.open_target(found, target)
    assert [spec.binary for spec in compiled.kernels] == [b"for another"]
    assert commands[0][4:6] == ["--target", "cuda:sm_86"]


def test_a_gpu_with_as_much_shared_memory_runs_the_binaries(tmp_path, monkeypatch):
    machine(monkeypatch, cuda="sm_86")
    monkeypatch.setattr(targets, "DriverDevice", FakeDriverDevice)
    fitting = [KERNEL | {"shared_bytes": 99 << 10}]
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_80", kernels=fitting)
    assert choose_target(found) == "cuda:sm_80"
    target = found.target("cuda:sm_80")
    assert isinstance(target, GpuTarget)
    _, compiled = targets.open_target(found, target)
    assert [spec.binary for spec in compiled.kernels] == [b"not a binary"]


def test_where_nothing_runs_a_target_says_what_it_needs(tmp_path, monkeypatch):
    machine(monkeypatch)
    assert choose_target(artifact(tmp_path / "a", "cuda:sm_90", cpu=False)) == "cuda:sm_90"
    both = artifact(tmp_path / "b", "cuda:sm_90", "triton-interpret", cpu=False)
    assert choose_target(both) == "triton-interpret"
    assert best(both, []) is None


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("cuda:sm_90", "an NVIDIA GPU of compute capability 9.0; libcuda.so.1 was not found"),
        ("cuda:sm_100", "an NVIDIA GPU of compute capability 10.0; libcuda.so.1 was not found"),
        ("hip:gfx942", "an AMD GPU of architecture gfx942; libamdhip64.so was not found"),
    ],
)
def test_what_a_target_needs_is_said_in_a_sentence(tmp_path, monkeypatch, name, needs):
    def missing(library: str, *_: Any) -> None:
        raise OSError(f"{library}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(ResourceError) as caught:
        runtime.load(artifact(tmp_path / "tiny.octavo", name).root, target=name)
    todo = "Load it with --target cpu to run here"
    needs = needs.replace(";", " and its driver;")
    assert str(caught.value) == f"tiny.octavo: its target {name} needs {needs}. {todo}."
    with pytest.raises(ResourceError, match="Compile it with --target cpu to run here"):
        runtime.load(artifact(tmp_path / "gpu.octavo", name, cpu=False).root)


def test_a_target_that_was_not_compiled_is_refused(tmp_path):
    root = artifact(tmp_path, "cuda:sm_90").root
    with pytest.raises(ArtifactError, match=r"no target 'cuda:sm_80' \(built: cpu, cuda:sm_90\)"):
        runtime.load(root, target="cuda:sm_80")
    with pytest.raises(ResourceError, match="isa = 'v4' with the target cuda:sm_90"):
        runtime.load(root, target="cuda:sm_90", isa="v4")


# --- kernels.json


def test_kernels_are_read_with_their_binaries(tmp_path):
    found = artifact(tmp_path, "cuda:sm_90")
    target = found.target("cuda:sm_90")
    assert isinstance(target, GpuTarget)
    (spec,) = targets._kernels(found, target)
    assert (spec.name, spec.symbol, spec.binary) == ("norm.0", "norm", b"not a binary")
    assert spec.signature == (("x", "*fp32"), ("rows", "i32")) and spec.shared_bytes == 1024
    assert dict(spec.constants) == {"BLOCK": 16, "EPS": 1e-5, "KIND": "rms", "BIAS": False}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file": "../norm.cubin"}, "leaves the artifact"),
        ({"file": "kernels/other.cubin"}, "not in the manifest's list of files"),
        ({"signature": [["x", "*fp32"], ["x", "i32"]]}, "whose names differ"),
        ({"signature": [["x", "*complex"]]}, "complex.* is no parameter's type"),
        ({"signature": ["x"]}, "pairs"),
        ({"constants": [["x", None]]}, "'constants' must be numbers and texts"),
        ({"num_warps": 0}, "num_warps"),
        ({"shared_bytes": 2**40}, "shared_bytes"),
        ({"scratch_bytes": 384}, "no scratch memory"),
        ({"symbol": None}, "symbol"),
    ],
)
def test_a_wrong_field_of_a_kernel_is_named(tmp_path, changes, said):
    found = artifact(tmp_path, "cuda:sm_90", kernels=[KERNEL | changes])
    target = found.target("cuda:sm_90")
    assert isinstance(target, GpuTarget)
    with pytest.raises(ArtifactError, match=said):
        targets._kernels(found, target)


# --- another GPU


def builds(monkeypatch: pytest.MonkeyPatch, cache: Path, code: int = 0) -> list[list[str]]:
    """Commands that ran in the place of the compiler. code: how they end."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        source, out = Path(command[3]), Path(command[-1])
        assert (source / "kernels.json").is_file() and (source / "kernels/kernels.py").is_file()
        if code == 0:
            (out / "kernels").mkdir(parents=True)
            (out / "kernels.json").write_text(json.dumps({"kernels": [KERNEL]}))
            (out / "kernels/norm.0.cubin").write_bytes(b"for another")
        return subprocess.CompletedProcess(command, code, "", "noise\nkernel norm.0 takes 300,000 bytes\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))
    return commands


class FakeDriverDevice:
    def __init__(self, api: FakeApi) -> None:
        self.name = api.name


class SmallDevice(FakeDriverDevice):
    """Of which nothing can be taken. closed: how many were."""

    closed = 0

    def free_memory(self) -> int:
        return 3 << 20

    def close(self) -> None:
        type(self).closed += 1


def test_a_device_is_refused_before_anything_is_taken_of_it_or_mapped(tmp_path, monkeypatch):
    machine(monkeypatch, cuda="sm_90")
    monkeypatch.setattr(targets, "DriverDevice", SmallDevice)
    monkeypatch.setattr(targets, "Weights", lambda *args: pytest.fail("the weights were mapped"))
    root = artifact(tmp_path, "cuda:sm_90").root
    has = "cuda:sm_90: a GPU of sm_90 has 3.0 MiB of memory free; this takes .* KV cache 4.0 MiB"
    with pytest.raises(ResourceError, match=has):
        runtime.load(root, kv_memory="4MiB", max_requests=1000)
    with pytest.raises(ResourceError, match="the host has .* free; swap takes .* Lower swap_memory"):
        runtime.load(root, kv_blocks=1, max_requests=1, swap_memory="100TiB")
    assert SmallDevice.closed == 2
    plan = runtime.plan(root, kv_memory="50%", max_requests=1000, target="cuda:sm_90")
    held = plan.total_bytes - plan.kv_bytes
    assert plan.kv_bytes == ((3 << 20) - held) // 2 // 2048 * 2048 and SmallDevice.closed == 3


def test_kernels_are_built_once_for_another_gpu(tmp_path, monkeypatch, caplog):
    machine(monkeypatch, triton=True, cuda="sm_100")
    monkeypatch.setattr(targets, "DriverDevice", FakeDriverDevice)
    commands = builds(monkeypatch, tmp_path / "cache")
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_90")
    target = found.target("cuda:sm_90")
    assert isinstance(target, GpuTarget)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            _, compiled = targets.open_target(found, target)
            assert [spec.binary for spec in compiled.kernels] == [b"for another"]
    (command,) = commands
    assert command[1:3] == ["-m", "codegen.triton.build"] and command[4:6] == ["--target", "cuda:sm_100"]
    said = "octavo: building the kernels of tiny.octavo for a GPU of sm_100 (cuda:sm_100), once"
    assert [record.message for record in caplog.records] == [said]
    assert len(list((tmp_path / "cache/rebuilt").iterdir())) == 1


@pytest.mark.parametrize(
    ("damaged", "data"), [("kernels.json", None), ("kernels.json", b"[]"), ("kernels/norm.0.cubin", None)]
)
def test_what_was_kept_and_is_damaged_is_built_again(tmp_path, monkeypatch, damaged, data):
    machine(monkeypatch, triton=True, cuda="sm_100")
    monkeypatch.setattr(targets, "DriverDevice", FakeDriverDevice)
    commands = builds(monkeypatch, tmp_path / "cache")
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_90")
    target = found.target("cuda:sm_90")
    assert isinstance(target, GpuTarget)
    targets.open_target(found, target)
    (folder,) = (tmp_path / "cache/rebuilt").iterdir()
    (folder / damaged).unlink()
    if data is not None:
        (folder / damaged).write_bytes(data)
    _, compiled = targets.open_target(found, target)
    assert [spec.binary for spec in compiled.kernels] == [b"for another"] and len(commands) == 2
    assert list((tmp_path / "cache/rebuilt").iterdir()) == [folder]


def test_a_user_without_a_home_is_told_where_to_keep_what_is_built(tmp_path, monkeypatch):
    machine(monkeypatch, triton=True, cuda="sm_100")
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_90")
    with pytest.raises(ArtifactError, match="Set OCTAVO_CACHE"):
        runtime.load(found.root, target="cuda:sm_90")


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    machine(monkeypatch, triton=True, cuda="sm_86")
    builds(monkeypatch, tmp_path / "cache", code=2)
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_90")
    with pytest.raises(ArtifactError, match="cuda:sm_86: kernel norm.0 takes 300,000 bytes. Compile"):
        runtime.load(found.root, target="cuda:sm_90")
    assert not list((tmp_path / "cache/rebuilt").iterdir())


def test_without_triton_another_gpu_is_refused(tmp_path, monkeypatch):
    machine(monkeypatch, cuda="sm_86")
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_90")
    with pytest.raises(ArtifactError, match="no binaries for a GPU of sm_86 .*, and Triton is not here"):
        runtime.load(found.root, target="cuda:sm_90")


def test_what_is_no_list_of_kernels_is_refused():
    for data in (b"[]", b"{}", b'{"kernels": 3}', b"\xff"):
        with pytest.raises(ArtifactError, match="kernels.json"):
            parse_kernels(data, "kernels.json", lambda name: b"")


def test_that_there_are_no_weights_is_said_before_anything_of_this_machine(tmp_path, monkeypatch):
    machine(monkeypatch)
    files = made.default_files()
    made.write(tmp_path, files, made.with_gpu(files, weights=None))
    with pytest.raises(ArtifactError, match="compile a checkpoint without --no-weights"):
        runtime.load(tmp_path, target="cuda:sm_90")


def test_sources_that_the_manifest_does_not_list_are_not_rebuilt(tmp_path, monkeypatch):
    machine(monkeypatch, triton=True, cuda="sm_100")
    builds(monkeypatch, tmp_path / "cache")
    found = artifact(tmp_path / "tiny.octavo", "cuda:sm_90")
    target = found.target("cuda:sm_90")
    assert isinstance(target, GpuTarget)
    with pytest.raises(ArtifactError, match="'other.py' is not in the manifest's list of files"):
        targets.open_target(found, replace(target, source="other.py"))


def test_what_another_process_built_meanwhile_is_kept(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / "kernels").mkdir(parents=True)
        (tmp_path / name / "kernels.json").write_text(json.dumps({"kernels": [KERNEL]}))
        (tmp_path / name / "kernels/norm.0.cubin").write_bytes(name.encode())
    rebuild._publish(tmp_path / "second", tmp_path / "first")
    assert (tmp_path / "first/kernels/norm.0.cubin").read_bytes() == b"first"
    (tmp_path / "first/kernels/norm.0.cubin").unlink()
    rebuild._publish(tmp_path / "second", tmp_path / "first")
    assert (tmp_path / "first/kernels/norm.0.cubin").read_bytes() == b"second"
