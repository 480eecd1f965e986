"""Names that would command a terminal, and places that are no files: pipes, devices, links, directories."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime
from compiler.artifact import is_artifact
from compiler.cli import streams
from compiler.cli.chat import conversation
from compiler.cli.chat.conversation import Conversation
from compiler.cli.errors import report
from compiler.cli.generate import _print_samples
from compiler.inspect import tables
from compiler.inspect.files import write_whole
from runtime import OctavoError
from tests.cli.refused import Commands
from tests.cli.staged import Staged, imported, write

ORDERS = "\x1b[2J\x9b31m\x07"  # clear the screen, red, ring
NAME = f"{ORDERS}[/bold]:smile:\nx"


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A read of a pipe that nobody writes ends the test."""
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    layers = json.dumps(ORDERS)[1:-1]
    text = imported(["k <= q"], layers, NAME)
    return write(tmp_path_factory.mktemp("hostile") / "m.octavo", text)


@pytest.mark.parametrize("view", [[], ["--stages"], ["--ir", "graph"], ["--diff", "00", "07"]])
def test_what_names_say_is_not_obeyed(commands: Commands, staged: Staged, view: list[str]) -> None:
    code, out, err = commands.run("inspect", staged.path, *view)
    assert (code, err) == (0, "")
    assert not set(ORDERS) - set("[2Jm31") & set(out)
    assert "\\x1b[2J" in out or "\\u001b[2J" in out or view == ["--stages"]
    if not view:
        assert "[/bold]:smile:\\nx" in out.replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("columns", ["0", "1", "9"])
def test_a_narrow_terminal_shows_all(
    commands: Commands, staged: Staged, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = commands.run("inspect", staged.path)
    assert "vocabulary 37" in out
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert tables.console().is_terminal and tables.console().width >= 60


def test_a_models_text_is_not_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = runtime.Completion(0, 0, f"a{ORDERS}\tb", [1], "stop", None, None, [1], 0, None, None)  # type: ignore[arg-type]
    for is_terminal, text in ((True, "a[2J31m\tb"), (False, said.text)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda found=is_terminal: found)
        assert streams.for_terminal(said.text) == text
        _print_samples([said])
        assert capsys.readouterr().out.splitlines()[1:] == [text]


def test_a_link_a_pipe_and_a_device_stay(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "real.html", tmp_path / "link.html", tmp_path / "pipe.html"
    link.symlink_to(target)
    write_whole(link, "page")
    assert link.is_symlink() and target.read_text() == "page"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "page")
    assert os.read(reader, 9) == b"page" and pipe.is_fifo()
    os.close(reader)
    write_whole(long := tmp_path / ("n" * 250 + ".html"), "page")
    assert long.read_text() == "page"
    assert sorted(os.listdir(tmp_path)) == sorted(["real.html", "link.html", "pipe.html", long.name])


@pytest.mark.parametrize("option", ["--html", "--graph"])
@pytest.mark.parametrize("place", ["/", "", "missing/x.dot", "folder.dot"])
def test_where_no_page_can_be(
    commands: Commands,
    staged: Staged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    place: str,
) -> None:
    (tmp_path / "folder.dot").mkdir()
    monkeypatch.chdir(tmp_path)
    commands.refuses("inspect", staged.path, option, place, says="directory")


def test_a_pipe_is_no_input(commands: Commands, tmp_path: Path, no_hang: None) -> None:
    for name in ("m.gguf", "g.ir", "chat.json", "manifest.json"):
        os.mkfifo(tmp_path / name)
    commands.refuses("compile", tmp_path / "m.gguf", "-o", tmp_path / "x.octavo", "--dry-run")
    commands.refuses("explain", tmp_path / "g.ir", says="not a file")
    commands.refuses("opt", tmp_path / "g.ir", says="not a file")
    for act in (conversation.read, lambda path: conversation.write(Conversation(), path)):
        with pytest.raises(OctavoError, match="no conversation|not a file"):
            act(tmp_path / "chat.json")
    assert not is_artifact(tmp_path)


def test_a_full_disk_below_stderr_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")
    monkeypatch.setattr(sys, "stderr", full)
    assert report(OctavoError("wrong", where="here", todo="Right it")) == 2
    with pytest.raises(OSError):
        full.close()


def test_json_is_json_on_a_stream_without_unicode() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii", errors="backslashreplace")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(sys, "stdout", out)
        from compiler.cli.chat.shown import _print

        _print({"text": "é😀\udc80"})
    assert json.loads(out.buffer.getvalue()) == {"text": "é😀\udc80"}  # type: ignore[attr-defined]
