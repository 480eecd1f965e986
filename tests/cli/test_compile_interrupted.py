"""octavo compile ended by a signal: nothing is half-written, no program runs on, what was there is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compiler.artifact import ArtifactWriter

ROOT = Path(__file__).parents[2]
COMPILER = """\
#!/bin/sh
if [ "$1" = --version ]; then echo made 1; exit; fi
if [ "$HANG" ]; then
  echo half > "$TMPDIR/half.s"
  sleep 543 &
  touch "$MARK.build"
  sleep 543
fi
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
LINE = "octavo: interrupted; nothing was written"


@dataclass
class Server:
    """tests/compiler/made.py as a program."""

    process: subprocess.Popen[str]

    def start(self, *args: str, out: Path, **env: str) -> int:
        """The process's number."""
        assert self.process.stdin is not None
        print(json.dumps({"args": args, "env": env, "out": str(out)}), file=self.process.stdin, flush=True)
        return self.code()

    def code(self) -> int:
        """The exit code, when it has ended."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.compiler.made"], cwd=ROOT, stdin=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, env=os.environ | {"DEBUG": "0", "COLUMNS": "200"},
    )  # fmt: skip
    with process:
        yield Server(process)


def wait_until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    end = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def hanging() -> list[str]:
    """Processes of the compiler that hangs."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if b"sleep\x00543" in path.read_bytes() else []
        except OSError:
            continue
    return found


class Case:
    """A compile to where an artifact stands already, with places of its own for all else."""

    def __init__(self, server: Server, tmp_path: Path) -> None:
        self.server, self.tmp, self.out = server, tmp_path, tmp_path / "here/m.octavo"
        self.said = tmp_path / "said"
        self.out.parent.mkdir()
        (tmp_path / "tmp").mkdir()
        (tmp_path / "cxx").write_text(COMPILER)
        (tmp_path / "cxx").chmod(0o755)
        with ArtifactWriter(self.out) as writer:
            writer.write("old", "old")
            writer.seal({"name": "old"})
            writer.publish()

    def start(self, **env: str) -> int:
        places = {"MARK": "mark", "TMPDIR": "tmp", "CXX": "cxx"}
        env |= {name: str(self.tmp / place) for name, place in places.items()}
        args = ("compile", "made", "-o", str(self.out), "--isa", "baseline", "--no-cache")
        return self.server.start(*args, out=self.said, **env)

    def wait(self, mark: str) -> None:
        wait_until((self.tmp / f"mark.{mark}").exists)

    def assert_interrupted(self) -> None:
        """And all is as it was before."""
        assert self.server.code() == 130
        assert self.said.read_text().splitlines()[-1] == LINE
        assert [path.name for path in self.out.parent.iterdir()] == ["m.octavo"]
        assert (self.out / "old").read_text() == "old"
        assert list((self.tmp / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("stage", "signum"),
    [("import", signal.SIGINT), ("dce", signal.SIGHUP), ("pack", signal.SIGTERM), ("hash", signal.SIGINT)],
)
def test_a_signal_ends_a_compile_with_nothing_written(
    server: Server, tmp_path: Path, stage: str, signum: int
) -> None:
    case = Case(server, tmp_path)
    pid = case.start(WAIT_AT=stage)
    case.wait("stage")
    os.kill(pid, signum)
    case.assert_interrupted()


def test_a_signal_ends_the_compilers_and_what_they_started(server: Server, tmp_path: Path) -> None:
    case = Case(server, tmp_path)
    pid = case.start(HANG="1")
    case.wait("build")
    wait_until(lambda: len(hanging()) >= 2)
    os.kill(pid, signal.SIGTERM)  # a terminal's Ctrl-C does not reach them either
    case.assert_interrupted()
    wait_until(lambda: not hanging(), 5)


@pytest.mark.parametrize("signals", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM, signal.SIGHUP]])
def test_another_signal_does_not_keep_a_compile_from_cleaning_up(
    server: Server, tmp_path: Path, signals: list[int]
) -> None:
    case = Case(server, tmp_path)
    pid = case.start(WAIT_AT="verify", WAIT_IN_CLEANUP="1")
    case.wait("stage")
    os.kill(pid, signals[0])
    case.wait("cleanup")
    os.kill(pid, signals[1])
    case.assert_interrupted()


def test_what_a_killed_compile_left_the_next_one_removes(server: Server, tmp_path: Path) -> None:
    case = Case(server, tmp_path)
    pid = case.start(HANG="1")
    case.wait("build")
    os.kill(pid, signal.SIGKILL)
    assert case.server.code() == -signal.SIGKILL
    for number in hanging():  # nothing can end those
        os.kill(int(number), signal.SIGKILL)
    assert len(list(case.out.parent.iterdir())) == 2 and list((tmp_path / "tmp").iterdir())
    pid = case.start(WAIT_AT="verify")
    case.wait("stage")
    os.kill(pid, signal.SIGINT)
    case.assert_interrupted()
