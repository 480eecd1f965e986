"""What a shell is offered at Tab, asked as the shells' scripts ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.cpp.build import default_levels
from codegen.kv_block import BLOCKS
from compiler.cli import values
from compiler.cli.main import COMMANDS, main
from compiler.options import DTYPES
from compiler.quantization.options import ACTIVATIONS, ALGORITHMS, KV, WEIGHTS
from compiler.targets import TARGETS

ROOT = Path(__file__).parents[2]


class Shell:
    """Asks in this process, in a folder of its own with two artifacts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        for name, target in (("tiny", "cuda:sm_90"), ("a b", "cpu")):
            (folder / f"{name}.octavo").mkdir()
            files = {"stages/03-fuse_norm.ir": {}, "targets/cpu/graph.ir": {}}
            manifest = {"targets": {target: {}}, "files": files}
            (folder / f"{name}.octavo" / "manifest.json").write_text(json.dumps(manifest))
        (folder / "README.md").touch()
        monkeypatch.chdir(folder)

    def bash(self, *words: str) -> list[str]:
        """The last word is completed."""
        return self.ask("bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))[1]

    def ask(self, shell: str, **env: str) -> tuple[int, list[str]]:
        self.monkeypatch.setenv("_OCTAVO_COMPLETE", f"complete_{shell}")
        for name, value in env.items():
            self.monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main([])
        return int(ended.value.code or 0), self.capsys.readouterr().out.split("\n")[:-1]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["octavo", ""], list(COMMANDS)),
        (["octavo", "ch"], ["chat"]),
        (["octavo", "chat", "t"], ["tiny.octavo"]),
        (["octavo", "chat", ""], ["a\\ b.octavo", "tiny.octavo"]),
        (["octavo", "chat", "./t"], ["./tiny.octavo"]),
        (["octavo", "chat", "R"], [""]),  # the shell offers its files
        (["octavo", "chat", "nowhere/"], [""]),
        (["octavo", "chat", "tiny.octavo", "--temp"], ["--temperature"]),
        (["octavo", "chat", "tiny.octavo", "--target", ""], ["cuda:sm_90"]),
        (["octavo", "chat", "a\\ b.octavo", "--target", ""], ["cpu"]),
        (["octavo", "inspect", "tiny.octavo", "--ir", ""], ["03-fuse_norm", "graph"]),
        (["octavo", "compile", "x", "--target", ""], list(TARGETS)),
        (["octavo", "compile", "x", "--target", "cuda", ":", "sm_9"], ["sm_90"]),  # as bash splits
        (["octavo", "compile", "x", "--target", "cuda", ":"], ["sm_80", "sm_90", "sm_100"]),
        (["octavo", "compile", "x", "--target", "cuda:sm_9"], ["cuda:sm_90"]),  # as bash does not split
        (["octavo", "compile", "x", "--target", "=", "hip", ":", "g"], ["gfx942"]),
        (["octavo", "compile", "x", "--target", "="], list(TARGETS)),
        (["octavo", "compile", "x", "--dtype", "b"], ["bf16"]),
        (["octavo", "compile", "x", "--isa", "v3,b"], ["v3,baseline"]),
        (["octavo", "compile", "x", "--block", "6"], ["64"]),
        (["octavo", "nonsense", "x", ""], list(COMMANDS)),
        (["octavo", "chat", "--nonsense", "x", "--temp"], ["--temperature"]),
    ],
)
def test_bash_is_offered(shell: Shell, words: list[str], offered: list[str]) -> None:
    assert shell.bash(*words) == offered


def test_zsh_and_fish_are_offered_the_same_with_help(shell: Shell) -> None:
    code, (line, *more) = shell.ask("zsh", _TYPER_COMPLETE_ARGS="octavo compile x --dtype ")
    assert code == 0 and [line, *more] == ['_arguments \'*: :(("f32"', '"bf16"))\'']
    assert shell.ask("zsh", _TYPER_COMPLETE_ARGS="octavo chat R") == (0, ["_files"])
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": "octavo chat --tem"}
    assert shell.ask("fish", **fish) == (0, ["--temperature\t0 is greedy."])
    fish["_TYPER_COMPLETE_FISH_ACTION"] = "is-args"
    assert shell.ask("fish", **fish)[0] == 0
    assert shell.ask("fish", **{**fish, "_TYPER_COMPLETE_ARGS": "octavo chat R"})[0] == 1  # files then


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"targets": 1, "files": 1}']
)
def test_a_damaged_artifact_is_offered_what_there_is(shell: Shell, content: bytes) -> None:
    Path("tiny.octavo/manifest.json").write_bytes(content)
    assert shell.bash("octavo", "chat", "tiny.octavo", "--target", "") == list(TARGETS)
    assert shell.bash("octavo", "inspect", "tiny.octavo", "--ir", "") == ["graph"]


def test_the_values_are_those_that_the_compiler_takes() -> None:
    assert values.TARGETS == TARGETS
    assert values.dtypes("") == DTYPES
    assert values.blocks("") == tuple(map(str, BLOCKS))
    assert (values.weight_formats(""), values.algorithms("")) == (WEIGHTS, ALGORITHMS)
    assert (values.activations(""), values.kv_formats("")) == (ACTIVATIONS, KV)
    assert values.LEVELS == default_levels(bf16=True, int8=True)


ASK = """\
import sys, time
from compiler.cli.main import main
for words in {words}:
    sys.stdout.flush()
    import os
    os.environ.update(COMP_WORDS=chr(10).join(words), COMP_CWORD=str(len(words) - 1))
    try:
        main([])
    except SystemExit as end:
        assert not end.code
HEAVY = {{"numpy", "rich", "sympy", "tokenizers", "torch", "transformers"}}
print("heavy:", *sorted(HEAVY & set(sys.modules)))
"""


def test_nothing_is_imported_that_takes_time() -> None:
    words = [["octavo", ""], *(["octavo", name, "--"] for name in COMMANDS)]
    env = {**os.environ, "_OCTAVO_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, "-c", ASK.format(words=words)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stderr == "" and done.stdout.splitlines()[: len(COMMANDS)] == list(COMMANDS)
    assert done.stdout.count("--json") >= 4 and done.stdout.endswith("\nheavy:\n")


def test_a_word_before_the_command_hides_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--", "opt", "--list"])
    assert not ended.value.code and "fuse_norm" in capsys.readouterr().out


def test_the_script_is_shown_and_installed(tmp_path: Path) -> None:
    """In bash, whose name the parent of the command has."""
    octavo = f"{sys.executable} -m compiler.cli.main"
    script = f'{octavo} --show-completion > "$HOME/shown"; {octavo} --install-completion; exit $?'
    env = {**os.environ, "HOME": str(tmp_path), "DEBUG": "0"}
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "bash completion installed in" in done.stdout
    installed = tmp_path / ".bash_completions" / "octavo.sh"
    assert installed.read_text().strip() == (tmp_path / "shown").read_text().strip()
    assert str(installed) in (tmp_path / ".bashrc").read_text()
    assert "complete -o default -F _octavo_completion octavo" in installed.read_text()


def test_a_shell_that_is_not_known_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("elvish", "/bin/elvish"))
    with pytest.raises(SystemExit) as ended:
        main(["--install-completion"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err == "octavo: --install-completion: elvish is not known. Run it from bash, zsh or fish.\n"
