"""compiler/artifact.py and the driver where processes meet, and where the disk does not do what is asked."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import compiler
from codegen import scratch
from codegen.scratch import is_abandoned, owner_tag
from compiler import artifact
from compiler.artifact import ArtifactWriter, replace_directory
from compiler.errors import CompileError
from tests.compiler import made

ROOT = Path(__file__).parents[2]
PUBLISH = """
import sys
import tempfile
from pathlib import Path
from compiler import artifact

if sys.argv[3] == "two steps":
    artifact._exchange = lambda first, second: False
for turn in range(25):
    with artifact.ArtifactWriter(Path(sys.argv[1])) as writer:
        for name in "abc":
            writer.write(name, sys.argv[2] + str(turn))
        writer.seal({"name": "m"})
        writer.publish()
"""


@pytest.mark.parametrize("way", ["exchange", "two steps"])
def test_whichever_of_two_processes_is_last_the_artifact_is_whole(tmp_path: Path, way: str) -> None:
    out = tmp_path / "m.octavo"
    processes = [subprocess.Popen([sys.executable, "-c", PUBLISH, str(out), n, way], cwd=ROOT) for n in "xy"]
    assert [process.wait(100) for process in processes] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["m.octavo"]
    assert len({(out / name).read_text() for name in "abc"}) == 1
    files = json.loads((out / "manifest.json").read_text())["files"]
    assert files == artifact.hash_files(out)


def test_a_folder_whose_process_runs_is_not_removed_and_one_of_another_with_its_number_is(
    tmp_path: Path,
) -> None:
    place, pid, start, _ = owner_tag().split("-")
    for tag, is_gone in {
        owner_tag(): False,
        f"{place}-{pid}-{int(start) - 1}-00000000": True,  # the number was used before
        f"{place}-{2**22 + 1}-{start}-00000000": True,  # no such process
        f"{'0' * 8}-{pid}-{start}-00000000": False,  # of another machine, a moment ago
        "thesis": False,
    }.items():
        (tmp_path / tag).mkdir()
        assert is_abandoned(tmp_path / tag, tag) == is_gone, tag


def test_a_folder_of_another_machine_is_removed_a_day_after_its_last_change(tmp_path: Path) -> None:
    left = tmp_path / f".m.octavo.partial-{'0' * 8}-1-1-00000000"
    (left / "weights").mkdir(parents=True)
    before = time.time() - scratch.ONE_DAY_S - 9
    for path in (left / "weights", left):
        os.utime(path, (before, before))
    (left / "weights/cpu.safetensors").write_text("just now")
    os.utime(left / "weights", (0, 0))
    with ArtifactWriter(tmp_path / "m.octavo"):
        assert left.exists()
    os.utime(left / "weights/cpu.safetensors", (0, 0))
    with ArtifactWriter(tmp_path / "m.octavo"):
        assert not left.exists()


def test_what_was_moved_aside_when_the_process_was_killed_is_put_back(tmp_path: Path) -> None:
    place, _, start, _ = owner_tag().split("-")
    left = tmp_path / f".m.octavo.partial-{place}-{2**22 + 1}-{start}-00000000"
    left.mkdir()
    old = left.with_name(left.name + ".old")
    old.mkdir()
    (old / "kept").write_text("old")
    with ArtifactWriter(tmp_path / "m.octavo", force=True):
        assert (tmp_path / "m.octavo/kept").read_text() == "old"
        assert not left.exists() and not old.exists()


def test_another_that_comes_in_between_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where directories cannot be exchanged, both processes move the old one aside."""
    monkeypatch.setattr(artifact, "_exchange", lambda first, second: False)
    out, new, rename, calls = tmp_path / "out", tmp_path / "new", os.rename, list[str]()
    for name in ("out", "new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()

    def late(source: Any, target: Any) -> None:
        calls.append(str(source))
        if len(calls) == 3:
            rename(tmp_path / "other", out)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    replace_directory(new, out)
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, code: int, after: int = 0
) -> Iterator[None]:
    """Within it a function fails, after some calls, as the system does."""
    real, calls = getattr(owner, name), list[int]()

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) <= after:
            return real(*args, **options)
        path = str(args[0]) if isinstance(args[0], Path) and code != errno.ENOSPC else None
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        yield
    assert len(calls) > after


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compile takes a made model and a compiler that writes a word; where it writes to."""
    monkeypatch.setattr("compiler.importers.load", made.made)
    cxx = tmp_path / "cxx"
    cxx.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n'
    )
    cxx.chmod(0o755)
    monkeypatch.setenv("CXX", str(cxx))
    (tmp_path / "here").mkdir()
    return tmp_path / "here/m.octavo"


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        (Path, "write_bytes", 0),  # the tokenizer's files or the first graph
        (Path, "write_bytes", 3),  # the source
        (os, "posix_fallocate", 0),  # the weights
        ("compiler.artifact", "hash_files", 0),
        (Path, "write_bytes", 9),  # the manifest
    ],
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_with_the_place_and_the_need_and_nothing_is_left(
    compiles: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: int, code: int
) -> None:
    place = sys.modules[owner] if isinstance(owner, str) else owner
    with failing(monkeypatch, place, name, code, after):
        with pytest.raises(CompileError) as refused:
            compiler.compile("made", compiles, isa=["baseline"], cache=False)
    message = str(refused.value)
    assert message.startswith(f"{compiles}: ") and "takes about" in message and "\n" not in message
    assert list(compiles.parent.iterdir()) == []


def test_a_compiler_without_room_is_a_full_disk(compiles: Path, tmp_path: Path) -> None:
    full = '#!/bin/sh\n[ "$1" = --version ] && exit\necho "as: $6: No space left on device" >&2\nexit 1\n'
    (tmp_path / "cxx").write_text(full)
    with pytest.raises(CompileError, match="(?i)no space left on device: it takes about .* free") as refused:
        compiler.compile("made", compiles, isa=["baseline"], cache=False)
    assert "\n" not in str(refused.value)
    assert list(compiles.parent.iterdir()) == []


def test_a_full_folder_for_temporary_files_is_named(compiles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tempfile.gettempdir()
    real = Path.mkdir

    def fail(path: Path, *args: Any, **options: Any) -> None:
        if path.name.startswith(scratch.PREFIX):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(CompileError, match=rf"^{re.escape(temporary)}: no space.*TMPDIR"):
        compiler.compile("made", compiles, isa=["baseline"], cache=False)
    assert list(compiles.parent.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_directory_that_cannot_be_written_is_one_line(
    compiles: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with failing(monkeypatch, Path, "mkdir", code):
        with pytest.raises(
            CompileError, match=rf"^{re.escape(str(compiles))}: .*Choose another place with -o"
        ):
            compiler.compile("made", compiles, isa=["baseline"], cache=False)
    assert list(compiles.parent.iterdir()) == []
