"""An artifact that a compile replaces while it is read: one of the two as a whole, or a line that says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import artifact, loading
from runtime.artifact import Artifact
from runtime.errors import ArtifactError
from tests.runtime import made

FILE = "targets/cpu/graph.ir"


class Two:
    """The artifact at `path`, and another of other files that `replace` puts in its place."""

    def __init__(self, root: Path) -> None:
        self.path, self._next = root / "m.octavo", root / "next"
        made.write(self.path)
        other = made.default_files() | {FILE: b"graph @other() {}\n"}
        made.write(self._next, other, made.manifest(other, name="other"))

    def replace(self) -> None:
        if self._next.exists():
            os.rename(self.path, self.path.with_name("old"))
            os.rename(self._next, self.path)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_while_it_is_hashed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    check = artifact._check_hash

    def replaced(*args: Any) -> None:
        two.replace()
        check(*args)

    monkeypatch.setattr(artifact, "_check_hash", replaced)
    found = Artifact.open(two.path)
    assert found.manifest.name == "other" and b"@other" in found.read(FILE)


def test_after_it_was_opened(two: Two) -> None:
    found = Artifact.open(two.path)
    assert b"@tiny" in found.read(FILE)
    two.replace()
    with pytest.raises(ArtifactError, match="in its place while it was read. Try again"):
        found.read(FILE)


def test_while_it_is_loaded(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    closed: list[str] = []

    class Executor:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    class Memory:
        groups, swap_blocks = (), 0

    def opened(found: Artifact, *_: Any) -> tuple[Executor, type[Memory]]:
        tried.append(found.manifest.name)
        two.replace()
        return Executor(found.manifest.name), Memory

    monkeypatch.setattr(loading, "_open_cpu", opened)
    monkeypatch.setattr(loading, "Engine", lambda executor, *_: executor)
    assert runtime.load(two.path).name == "other"  # type: ignore[attr-defined]
    assert (tried, closed) == (["tiny", "other"], ["tiny"])


def test_damage_is_no_replacement(two: Two) -> None:
    (two.path / FILE).write_bytes(b"graph @worse() {}")
    with pytest.raises(ArtifactError, match="Get an undamaged copy"):
        Artifact.open(two.path)
