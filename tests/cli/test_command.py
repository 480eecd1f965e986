"""The octavo command: help, errors on one line with the right exit code, and opt."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from compiler.cli.compile import _next
from compiler.cli.main import main

ROOT = Path(__file__).parents[2]

DEAD = """\
graph @g(%x: f32[3]) {
  %unused = exp %x : f32[3]
  %y = neg %x : f32[3]
  return %y
}
"""
ALIVE = """\
graph @g(%x: f32[3]) {
  %y = neg %x : f32[3]
  return %y
}
"""


def octavo(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "compiler.cli.main", *args],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, "DEBUG": "0", **env},
    )


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """octavo() in this process, which has imported already what takes most of a process's time."""

    def run(*args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in {"DEBUG": "0", **env}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main(args)
        return subprocess.CompletedProcess(args, int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.mark.parametrize("command", ["compile", "generate", "explain", "inspect", "opt", "bench", "profile"])
def test_help_teaches_by_example(here: Run, command: str) -> None:
    done = here(command, "--help", COLUMNS="200")
    assert done.returncode == 0
    assert f"octavo {command} " in done.stdout.split("Options")[0].replace("Usage: ", "", 1)


def test_help_keeps_each_example_on_a_line_of_its_own(here: Run) -> None:
    lines = [line.strip() for line in here("opt", "--help", COLUMNS="200").stdout.splitlines()]
    first = lines.index("octavo opt 00-imported.ir -p canonicalize,fuse_norm")
    assert lines[first + 1] == "octavo inspect model.octavo --ir graph | octavo opt - -p dce,cse"


def test_the_version_is_shown(here: Run) -> None:
    done = here("--version")
    assert (done.returncode, done.stdout) == (0, f"octavo {version('octavo')}\n")


HELP = """\
import sys
from compiler.cli.main import main
sys.argv = ["octavo", "--help"]
try:
    main()
except SystemExit:
    print("slow:", *{"torch", "transformers", "sympy", "onnx"} & set(sys.modules))
"""


def test_help_imports_nothing_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "Usage: octavo" in done and done.rstrip().endswith("slow:")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["opt", "nowhere.ir", "-p", "dce"], "octavo: nowhere.ir: no such file"),
        (["opt", "-", "-p", "dcee"], "octavo: -p: there is no pass 'dcee'"),
        (["opt", "-", "-p", "dce{fast=true}"], "octavo: -p dce: no option 'fast=true'"),
        (["opt", "-", "-p", "page_kv{block=0}"], "octavo: -p: page_kv: block must be from 1"),
        (
            ["genrate", "x"],
            "octavo: genrate: there is no such command. Did you mean generate? See",
        ),
        (
            ["generate", "a", "b", "--temp", "1"],
            "no such option. Did you mean --temperature? See",
        ),
        (["generate", "a", "hi", "there"], "octavo: there: more than the command takes. Put quotes around a"),
        (
            ["generate", "a"],
            "octavo: prompt: it is missing: the prompt; - reads it from stdin. See",
        ),
        (
            ["compile", "docs"],
            "octavo: --out: it is missing: the artifact to write, NAME.octavo. See",
        ),
        (["generate", "nowhere.octavo", "hi"], "octavo: "),
        (["inspect", "README.md"], "octavo: "),
        (["compile", "nowhere", "-o", "/tmp/x.octavo"], "octavo: nowhere"),
        (["compile", "owner/name", "-o", "/tmp/x.octavo"], "first: hf download owner/name --local-dir name"),
        (["compile", "docs", "-o", "docs", "--force", "--dry-run"], "docs: the checkpoint lies there"),
        (["compile", "docs", "-o", "docs"], "exists and is not an engine artifact"),
        (["compile", "docs", "-o", "x" * 300], "File name too long"),
        (["compile", "docs", "-o", "x.octavo", "--max-context", "99999999999"], "octavo: --max-context"),
        (["compile", "docs", "-o", "x.octavo", "--dtype", "f8"], "octavo: --dtype f8"),
        (["compile", "docs", "-o", "x.octavo", "--target", "abacus"], "octavo: --target abacus"),
        (["compile", "docs", "-o", "x.octavo", "--block", "12"], "octavo: --block 12"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_two(here: Run, args: list[str], message: str) -> None:
    assert_one_line(here(*args, stdin=DEAD), message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["opt", "-", "-p", "page_kv{block=0}"], "octavo: -p: page_kv: block must be from 1"),
        (["inspect", "README.md"], "octavo: "),
        (["compile", "nowhere", "-o", "/tmp/x.octavo"], "octavo: nowhere"),
        (["compile", "docs", "-o", "x.octavo", "--max-context", "99999999999"], "octavo: --max-context"),
    ],
)
def test_a_mistake_is_all_that_a_process_says(args: list[str], message: str) -> None:
    """What it imports says nothing."""
    assert_one_line(octavo(*args, stdin=DEAD), message)


def test_a_checkpoint_is_no_artifact_and_is_to_be_compiled_first(here: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = [tmp_path / "model.gguf", tmp_path / "model.onnx"]
    for path in files:
        path.write_bytes(b"GGUF")
    for path in (tmp_path, *files):
        said = f"{path}: .*. This is a checkpoint: compile it first, octavo compile {path} -o NAME.octavo."
        done = here("generate", str(path), "hi")
        assert done.returncode == 2 and re.search(said, done.stderr), done.stderr


def test_a_compile_ends_with_a_command_that_runs_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "two words.octavo"
    assert _next(path) == "Run it: octavo generate 'two words.octavo' \"Once upon a time\""
    (path / "tokenizer").mkdir(parents=True)
    (path / "tokenizer" / "chat_template.jinja").touch()
    assert _next(path) == "Talk with it: octavo chat 'two words.octavo'"


def assert_one_line(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("command", "option", "value"), [("bench", "--seed", "-1"), ("profile", "--requests", str(2**20 + 1))]
)
def test_a_number_out_of_its_range_is_refused(here: Run, command: str, option: str, value: str) -> None:
    done = here(command, "nowhere.octavo", option, value, COLUMNS="200")
    assert done.returncode == 2 and done.stderr.startswith(f"octavo: {option}: {value} is not in")


def test_a_runtime_without_the_compiler_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['sympy'] = None")
    done = octavo("opt", "-", "-p", "dce", stdin=DEAD, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'octavo[compile]'" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams_are_no_fault(closed: str) -> None:
    line = f"exec {sys.executable} -m compiler.cli.main opt README.md {closed}"
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and ("octavo: README.md, line 1" in done.stderr or closed == "2>&-")
    done = subprocess.run(["sh", "-c", line.replace("README.md", "-")], cwd=ROOT, input=DEAD, text=True)
    assert done.returncode == (2 if closed == "<&-" else 0)


def test_debug_shows_where_an_error_came_from(here: Run) -> None:
    done = here("opt", "nowhere.ir", "-p", "dce", DEBUG="1")
    assert "Traceback" in done.stderr and done.returncode == 2


def test_opt_runs_passes_over_text(tmp_path: Path) -> None:
    (tmp_path / "g.ir").write_text(DEAD)
    done = octavo("opt", str(tmp_path / "g.ir"), "-p", "dce")
    assert done.stdout == ALIVE
    assert done.stderr == "dce: 1\n"
    assert octavo("opt", "-", "-p", "dce", stdin=DEAD).stdout == ALIVE


def test_opt_lists_the_passes_with_their_options(here: Run) -> None:
    listed = here("opt", "--list").stdout
    names = [line.split("{")[0] for line in listed.splitlines() if line and not line.startswith(" ")]
    assert {"canonicalize", "dce", "cse", "page_kv", "plan_memory"} <= set(names)


@pytest.mark.parametrize(
    "text", ["graph @g(%x: f32[3]) {\n  %y = frobnicate %x : f32[3]\n  return %y\n}\n", "import os", "\0"]
)
def test_opt_refuses_what_is_no_graph(here: Run, text: str) -> None:
    done = here("opt", "-", "-p", "dce", stdin=text)
    assert done.returncode == 2 and done.stderr.startswith("octavo: -")
