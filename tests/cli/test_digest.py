"""--digest: the artifact that is meant, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.refused import Commands
from tests.runtime import made


@pytest.mark.parametrize("digest", ["0" * 64, "sha256:" + "f" * 64, "not a digest", "\x1b[31m"])
def test_another_or_a_malformed_one_is_refused(commands: Commands, tmp_path: Path, digest: str) -> None:
    engine = made.write(tmp_path / "tiny.octavo")
    commands.refuses("generate", engine, "hi", "--digest", digest, says="not the given")


@pytest.mark.parametrize("prefix", ["", "sha256:"])
def test_the_right_one_is_taken(commands: Commands, tmp_path: Path, prefix: str) -> None:
    """What stops this artifact is that its kernels are none."""
    engine = made.write(tmp_path / "tiny.octavo")
    digest = json.loads((engine / "manifest.json").read_text())["digest"].removeprefix("sha256:")
    _, _, text = commands.run("generate", engine, "hi", "--digest", prefix + digest)
    assert "digest" not in text and "octavo: " in text
