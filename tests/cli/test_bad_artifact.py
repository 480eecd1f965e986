"""Artifacts that are damaged, unsafe, of another version, or not for this machine: one line, exit code 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.manifest import VERSION
from tests.cli.refused import Commands, little_memory
from tests.runtime import made

KERNEL = "targets/cpu/kernels/forward.any.so"
WEIGHTS = "weights/cpu.safetensors"
FILES = (*made.default_files(), "manifest.json")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return made.write(tmp_path / "tiny.octavo")


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit(commands: Commands, engine: Path, name: str) -> None:
    """Anywhere: of the manifest a space may become another, which is no damage."""
    content = (engine / name).read_bytes()
    rng = np.random.default_rng(0)
    for at in {0, len(content) - 1, *rng.integers(0, len(content), 25).tolist()}:
        if name == "manifest.json" and content[at] in b" \n":
            continue
        changed = bytearray(content)
        changed[at] ^= 1 << int(rng.integers(0, 8))
        (engine / name).write_bytes(changed)
        where = str(engine) if name != "manifest.json" else ""
        commands.refuses("generate", engine, "hi", where=where)
        if name != WEIGHTS:  # which are not read
            commands.refuses("inspect", engine, where=where)
    (engine / name).write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["cut", "longer", "missing", "a folder", "a link", "a loop"])
def test_a_file_that_is_another(commands: Commands, engine: Path, name: str, change: str) -> None:
    path, content = engine / name, (engine / name).read_bytes()
    path.unlink()
    if change in ("cut", "longer"):
        path.write_bytes(content[:-1] if change == "cut" else content + b"x")
    elif change == "a folder":
        path.mkdir()
    elif change != "missing":
        (engine.parent / "elsewhere").write_bytes(content)
        path.symlink_to(engine.parent / "elsewhere" if change == "a link" else path)
    commands.refuses("generate", engine, "hi", where="" if name == "manifest.json" else str(path))


def kernel(**changes: Any) -> dict[str, Any]:
    raw = made.manifest(made.default_files())
    raw["targets"]["cpu"]["kernels"][0] |= changes
    return raw


def moved(to: str) -> dict[str, Any]:
    """The weights at another path, as target and list of files have it."""
    raw = made.manifest(made.default_files())
    raw["files"][to] = raw["files"].pop(WEIGHTS)
    raw["targets"]["cpu"]["weights"] = to
    return raw


def big(**entry: Any) -> dict[str, Any]:
    raw = made.manifest(made.default_files())
    raw["files"][WEIGHTS] |= entry
    return raw


MODEL = made.manifest({})["model"]
MANIFESTS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "of a newer version": (
        lambda: made.manifest(made.default_files(), version=VERSION + 1),
        f"format version {VERSION + 1}",
    ),
    "of no version": (lambda: made.manifest(made.default_files(), version="x"), "version"),
    "of another format": (lambda: made.manifest(made.default_files(), format="elf"), "format"),
    "for a CPU feature that is not here": (lambda: kernel(features=["avx4096"]), "needs avx4096"),
    "for another CPU": (lambda: kernel(arch="pdp11"), "needs pdp11"),
    "with a path up": (lambda: moved("../outside/cpu.safetensors"), "leaves the artifact"),
    "with an absolute path": (lambda: moved("/etc/passwd"), "leaves the artifact"),
    "with a path of dots": (lambda: moved("weights/../../outside/cpu.safetensors"), "leaves the artifact"),
    "with a path through a link": (lambda: moved("linked/cpu.safetensors"), "is a symbolic link"),
    "with no path": (lambda: moved(""), ""),
    "with a newline in a path": (lambda: moved("a\nb"), ""),
    "with a terminal's command in a path": (lambda: moved("\x1b[2J"), ""),
    "with a long path": (lambda: moved("x" * 5000), ""),
    "with a file of 2**60 bytes": (lambda: big(bytes=2**60), "'bytes' must be"),
    "with a file of less than no bytes": (lambda: big(bytes=-1), "bytes"),
    "with a hash that is none": (lambda: big(sha256="x"), "sha256"),
    "with a context of 2**60": (
        lambda: made.manifest(made.default_files(), model=MODEL | {"max_context": 2**60}),
        "max_context",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "says"), MANIFESTS.values(), ids=list(MANIFESTS))
def test_a_manifest(commands: Commands, tmp_path: Path, raw: Callable[[], dict[str, Any]], says: str) -> None:
    engine = made.write(tmp_path / "tiny.octavo", None, raw())
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/cpu.safetensors").write_bytes((engine / WEIGHTS).read_bytes())
    (engine / "linked").symlink_to(tmp_path / "outside")
    with little_memory():
        commands.refuses("generate", engine, "hi", says=says)


TEXTS = {
    "empty": b"", "a list": b"[]", "garbage": bytes(range(256)), "not UTF-8": b'{"format": "\xff"}',
    "deep": b'{"a":' + b"[" * 10**5, "a long number": b'{"version": ' + b"9" * 10**5 + b"}",
    "twice": b'{"format": "octavo", "format": "octavo"}', "NaN": b'{"format": NaN}',
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_a_manifest_that_is_no_manifest(commands: Commands, engine: Path, text: bytes) -> None:
    (engine / "manifest.json").write_bytes(text)
    for command in (["generate", engine, "hi"], ["inspect", engine], ["bench", engine], ["profile", engine]):
        commands.refuses(*command, says="manifest.json" if text else "")


@pytest.mark.parametrize("command", ["generate", "inspect", "bench", "profile"])
def test_what_is_no_artifact(commands: Commands, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    prompt = ["hi"] if command == "generate" else []
    for path in (
        tmp_path,
        tmp_path / "file",
        tmp_path / "nowhere",
        tmp_path / "loop",
        "x" * 300,
        "a\nb",
    ):
        commands.refuses(command, path, *prompt)
    assert os.listdir(tmp_path / "tmp") == []
