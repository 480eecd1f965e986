"""The command line in this process, on files of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.refused import Commands


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, monkeypatch, capsys)
