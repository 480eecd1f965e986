"""Binaries of Triton kernels, built without a device: what is in them, twice the same, and what cannot be."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from codegen import triton
from codegen.cache import Cache
from codegen.triton import find_device
from codegen.triton.build import BuiltKernel, build_kernels, kernels_json
from codegen.triton.devices import Device
from codegen.triton.launch import Kernel
from codegen.triton.rebuild import derived_device, rebuild
from codegen.triton.toolchain import BuildError, versions
from tests.codegen.harness import arg, lower, paged_builder, weight

HEADER = "import triton\nimport triton.language as tl\n\n\n"
SOURCE = (
    HEADER
    + """TWO = tl.constexpr(2.0)


@triton.jit
def twice(x):
    return x * TWO


@triton.jit
def matmul(x, w, out, size, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, size, K):
        k = start + tl.arange(0, K)
        left = tl.load(x + m[:, None] * size + k[None, :])
        right = tl.load(w + n[:, None] * size + k[None, :])
        total += tl.dot(left, tl.trans(right))
    tl.store(out + m[:, None] * size + n[None, :], twice(total))


@triton.jit
def add(x, out, count, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + at, twice(tl.load(x + at, mask=at < count)), mask=at < count)


@triton.jit
def broken(x, out, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out + at, tl.load(x + at) + undefined_name)
"""
)
POINTERS = (("x", "*bf16"), ("w", "*bf16"), ("out", "*fp32"), ("size", "i32"))
MATMUL = Kernel("matmul.0", "matmul", POINTERS, (("M", 128), ("N", 128), ("K", 64)),
                ("x", "w", "out", "size"), 8, 3)  # fmt: skip
ADD = Kernel("add.0", "add", (("x", "*fp32"), ("out", "*fp32"), ("count", "i32")), (("B", 256),), (), 4, 1)
BROKEN = Kernel("broken.0", "broken", (("x", "*fp32"), ("out", "*fp32")), (("B", 256),), (), 4, 1)
INSTRUCTION: dict[str, str] = {
    "cuda:sm_80": "mma", "cuda:sm_90": "wgmma", "cuda:sm_100": "tcgen05", "hip:gfx942": "mfma",
}  # fmt: skip


def build(
    directory: Path, kernels: list[Kernel], device: Device, cache: Path, source: str = SOURCE
) -> list[BuiltKernel]:
    (directory / "kernels").mkdir(parents=True)
    (directory / "kernels/kernels.py").write_text(source)
    return build_kernels(directory, kernels, device, cache=Cache(cache))


@dataclass(frozen=True)
class Cold:
    """Both kernels built with an empty cache."""

    device: Device
    folder: Path
    cache: Path
    built: list[BuiltKernel]

    def binary(self, kernel: Kernel) -> bytes:
        (file,) = [k.file for k in self.built if k.kernel == kernel]
        return (self.folder / str(file)).read_bytes()


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Cold]:
    @cache
    def made(target: str) -> Cold:
        folder, device = tmp_path_factory.mktemp("cold"), find_device(target)
        built = build(folder / "out", [MATMUL, ADD], device, folder / "cache")
        return Cold(device, folder / "out", folder / "cache", built)

    return made


@pytest.mark.parametrize("target", INSTRUCTION)
def test_resources_are_read_from_the_binary(cold: Callable[[str], Cold], target: str) -> None:
    found = cold(target)
    matmul, add = (k.json for k in found.built)
    assert INSTRUCTION[target] in matmul["matrix"] and add["matrix"] == {}
    assert all(k["spills"] == 0 and k["registers"] > 0 for k in (add, matmul))
    assert 32768 <= matmul["shared_bytes"] <= found.device.shared_bytes
    assert 0 < matmul["occupancy"] <= 1
    assert found.binary(ADD)[:4] == b"\x7fELF"


@pytest.mark.parametrize("target", ["cuda:sm_90", "hip:gfx942"])
def test_two_cold_builds_in_different_folders_give_the_same_bytes(
    tmp_path: Path, cold: Callable[[str], Cold], target: str
) -> None:
    first, out = cold(target), tmp_path / "a/longer/path"
    add, matmul = build(out, [ADD, MATMUL], first.device, tmp_path / "cache")
    assert [matmul, add] == first.built
    for built in (add, matmul):
        assert (out / str(built.file)).read_bytes() == first.binary(built.kernel)


def test_a_generated_module_is_built(tmp_path: Path) -> None:
    b, _ = paged_builder()
    graph = lower(b.graph([b.op("embed", arg(b, "ids"), weight("table", 40, 37))]), "gpu")
    device = find_device("cuda:sm_90")
    generated = triton.generate(graph, device)
    (kernel,) = [k for k in generated.kernels if k.function == "embed"]
    (built,) = build(tmp_path, [kernel], device, tmp_path / "cache", generated.source)
    entry = json.loads(json.dumps(built.json))
    assert (entry["name"], entry["symbol"], entry["file"]) == ("embed.0", "embed", "kernels/embed.0.cubin")
    assert entry["signature"] == [list(pair) for pair in kernel.signature]
    assert entry["scratch_bytes"] == entry["profile_scratch_bytes"] == 0


def test_kernels_are_reused_by_content_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: Callable[[str], Cold]
) -> None:
    before = cold("cuda:sm_90")
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # no worker can be started from here on
    other = "@triton.jit\ndef other(x):\n    return x\n\n\n"
    moved = SOURCE.replace("@triton.jit\ndef add", other + "@triton.jit\ndef add")
    (after,) = build(tmp_path / "b", [replace(ADD, name="add.3")], before.device, before.cache, moved)
    assert after.json == before.built[1].json | {"name": "add.3", "file": "kernels/add.3.cubin"}
    assert (tmp_path / "b/kernels/add.3.cubin").read_bytes() == before.binary(ADD)
    for old, new in (("return x * TWO", "return x + x"), ("constexpr(2.0)", "constexpr(3.0)")):  # in `add`
        with pytest.raises(OSError):
            build(tmp_path / new, [ADD], before.device, before.cache, SOURCE.replace(old, new))
    with pytest.raises(OSError):
        build(tmp_path / "c", [replace(ADD, num_warps=8)], before.device, before.cache)


def test_a_moved_function_compiles_to_the_same_binary(tmp_path: Path, cold: Callable[[str], Cold]) -> None:
    before = cold("cuda:sm_90")
    moved = HEADER + "\n# moved\n" * 9 + SOURCE
    build(tmp_path, [ADD], before.device, tmp_path / "cache", moved)
    assert (tmp_path / "kernels/add.0.cubin").read_bytes() == before.binary(ADD)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept[:100],
        lambda kept: b"[]",
        lambda kept: kept[:-9] + b"?" + kept[-8:],  # of the text in it
        lambda kept: put(b"{}"),
        lambda kept: put(b"[" * 10**5),
        lambda kept: put(json.dumps(read(kept) | {"binary": 3}).encode()),
        lambda kept: put(json.dumps(read(kept) | {"binary": "AAAA"}).encode()),
    ],
)
def test_a_damaged_cache_is_built_over(
    tmp_path: Path, cold: Callable[[str], Cold], damage: Callable[[bytes], bytes]
) -> None:
    first, kept = cold("cuda:sm_90"), tmp_path / "cache/kernels"
    shutil.copytree(first.cache, tmp_path / "cache")
    whole = {entry.name: entry.read_bytes() for entry in kept.iterdir()}
    for name, content in whole.items():
        (kept / name).write_bytes(damage(content))
    assert build(tmp_path / "out", [ADD], first.device, tmp_path / "cache") == first.built[1:]
    assert sum((kept / name).read_bytes() == content for name, content in whole.items()) == 1


def put(content: bytes) -> bytes:
    """A file of the cache that holds this."""
    return b"octavo-cache 1 " + hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def read(kept: bytes) -> dict[str, Any]:
    return json.loads(kept.partition(b"\n")[2])


def test_a_user_without_a_home_builds_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold: Callable[[str], Cold]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    first = cold("cuda:sm_90")
    monkeypatch.setattr(Path, "home", homeless)
    for name in ("OCTAVO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/kernels.py").write_text(SOURCE)
    assert build_kernels(tmp_path, [ADD], first.device) == first.built[1:]


def test_a_kernel_that_does_not_compile_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"(?s)broken\.0 for cuda:sm_90.*undefined_name is not defined"):
        build(tmp_path, [ADD, BROKEN], find_device("cuda:sm_90"), tmp_path / "cache")


def test_a_worker_that_dies_ends_in_an_error_with_its_last_words(tmp_path: Path) -> None:
    crash = HEADER + "import os, sys\nprint('out of luck', file=sys.stderr)\nos._exit(7)\n" + SOURCE
    with pytest.raises(BuildError, match=r"(?s)add\.0.*ended with code 7.*out of luck"):
        build(tmp_path, [ADD], find_device("cuda:sm_90"), tmp_path / "cache", crash)


def test_shared_memory_beyond_the_device_is_refused(tmp_path: Path) -> None:
    small = replace(find_device("cuda:sm_80"), shared_bytes=64 * 1024)
    with pytest.raises(BuildError, match=r"matmul\.0 for cuda:sm_80 takes .* a block has 65,536"):
        build(tmp_path, [replace(MATMUL, num_stages=4)], small, tmp_path / "cache")


def test_no_environment_variable_of_triton_reaches_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/nonexistent")
    assert build(tmp_path, [ADD], find_device("cuda:sm_80"), tmp_path / "cache")[0].registers


def test_an_artifacts_kernels_are_rebuilt_for_a_device_with_less_shared_memory(tmp_path: Path) -> None:
    device, kept = find_device("cuda:sm_80"), tmp_path / "kernels"
    deep = replace(MATMUL, num_stages=5)
    built = build(tmp_path / "a", [deep, ADD], device, kept)
    (tmp_path / "a/kernels.json").write_text(json.dumps(kernels_json(built, device)))
    command = [sys.executable, "-m", "codegen.triton.build", "a", "--target", "cuda:sm_89", "-o", "out"]
    environment = os.environ | {"OCTAVO_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(command, cwd=tmp_path, check=True, env=environment)
    listed = json.loads((tmp_path / "out/kernels.json").read_text())
    matmul, add = listed["kernels"]
    assert (listed["target"], matmul["num_stages"], add["num_stages"]) == ("cuda:sm_89", 4, 1)
    assert matmul["shared_bytes"] <= 99 * 1024 < built[0].shared_bytes
    assert (tmp_path / "out/kernels/matmul.0.cubin").read_bytes()[:4] == b"\x7fELF"
    assert (tmp_path / "out/kernels/kernels.py").read_text() == SOURCE


def test_source_for_another_vendor_is_not_rebuilt(tmp_path: Path) -> None:
    device = find_device("cuda:sm_80")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/kernels.py").write_text(SOURCE)
    (tmp_path / "kernels.json").write_text(json.dumps(kernels_json([], device)))
    with pytest.raises(BuildError, match="Compile the model with --target hip:gfx90a"):
        rebuild(tmp_path, "hip:gfx90a", tmp_path / "out")


def test_other_devices_take_the_limits_of_the_nearest_older_one() -> None:
    ampere, hopper = find_device("cuda:sm_80"), find_device("cuda:sm_90")
    assert derived_device("cuda:sm_90") == hopper
    ada = derived_device("cuda:sm_89")
    assert (ada.arch, ada.shared_bytes, ada.warps_per_sm, ada.num_sms) == (
        "sm_89",
        101376,
        48,
        ampere.num_sms,
    )
    assert derived_device("cuda:sm_87").shared_bytes == ampere.shared_bytes
    assert derived_device("cuda:sm_103").shared_bytes == find_device("cuda:sm_100").shared_bytes
    assert derived_device("hip:gfx90a").warp_size == 64
    for target in ("cuda:sm_75", "hip:gfx1100", "triton-interpret", "cpu"):
        with pytest.raises(triton.UnknownTarget, match="sm_80 and newer"):
            derived_device(target)


def test_the_version_is_that_of_whatever_package_triton_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "torchs-triton":
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.9.0+git"

    packages = {"triton": ["torchs-triton"]}
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: packages)
    assert versions("hip", "gfx942") == {"triton": "3.9.0+git"}
    packages.clear()
    with pytest.raises(BuildError, match="has no version. Install"):
        versions("hip", "gfx942")
