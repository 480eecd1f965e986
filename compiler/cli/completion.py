"""What a shell offers at Tab: commands, options, and the values of some. Typer speaks the shells' protocols.

A shell asks with environment variables, and waits: nothing is imported here but typer.
"""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

ASKED = "_OCTAVO_COMPLETE"  # typer's name for `octavo`
SHELLS = ("bash", "zsh", "fish")
OPTIONS = ("--install-completion", "--show-completion")
MOST_BYTES = 16 << 20  # of a manifest
TARGETS = ("cpu", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942", "triton-interpret")
LEVELS = ("v4-vnni-bf16", "v4", "v3", "baseline")

Values = Callable[..., Sequence[str]]


def is_asked() -> bool:
    return ASKED in os.environ


def words() -> list[str]:
    """Those of the line to complete, after `octavo`."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    try:
        return shlex.split(line)[1:]
    except ValueError:  # a quote that is still open
        return line.split()[1:]


def complete(app: typer.Typer) -> int:
    """Print what fits the words of the environment, and return the exit code."""
    found, split_off = joined(os.environ.get("COMP_WORDS", ""), os.environ.get("COMP_CWORD", "0"))
    os.environ["COMP_WORDS"] = "\n".join(found)
    os.environ["COMP_CWORD"] = str(len(found) - 1)
    out, code = io.StringIO(), 0
    try:
        with redirect_stdout(out):
            app(args=[], prog_name="octavo", standalone_mode=False)
    except SystemExit as end:
        code = int(end.code or 0)
    in_bash = os.environ[ASKED].endswith("bash")
    for line in out.getvalue().splitlines():
        print(_escaped(line).removeprefix(split_off) if in_bash else line)
    return code


def joined(line: str, last: str) -> tuple[list[str], str]:
    """The words up to the one to complete, and what bash does not take for a part of that.

    Bash splits words at colons and equals signs too: `--target=cuda:sm_90` comes as five, and only the last
    is replaced. line: a word a line. last: the number of the one to complete.
    """
    words = line.split("\n")[: int(last) + 1 if last.isdigit() else 0]
    found: list[str] = []
    for at, word in enumerate(words):
        if found and (word == ":" or found[-1].endswith(":")):
            found[-1] += word
        elif not (word == "=" and at < len(words) - 1 and found[-1].startswith("--")):
            found.append(word)
    before, colon, _ = found[-1].rpartition(":") if found and ":" in words else ("", "", "")
    return found, before + colon


def offering(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, declared anew with what there is for its parameters."""
    for name, hint in get_type_hints(command, include_extras=True).items():
        if name in VALUES:
            kind, info = get_args(hint)
            info = copy(info)
            info.autocompletion = VALUES[name]
            command.__annotations__[name] = Annotated[kind, info]
    return command


def _artifacts(incomplete: str) -> list[str]:
    """Directories NAME.octavo beside what was typed. Where there are none the shell offers its files."""
    folder, _, start = incomplete.rpartition("/")
    base = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    try:
        names = sorted(path.name for path in base.glob("*.octavo") if path.is_dir())
    except (OSError, RuntimeError):
        return []
    before = incomplete[: len(incomplete) - len(start)]
    return [before + name for name in names if name.startswith(start)]


def _targets(incomplete: str) -> Sequence[str]:
    """Of an artifact those that it has, else all."""
    found = _manifest().get("targets")
    return list(found) if isinstance(found, Mapping) else TARGETS


def _stages(incomplete: str) -> list[str]:
    files = _manifest().get("files")
    found = [] if not isinstance(files, Mapping) else [Path(f).stem for f in files if f.startswith("stages/")]
    return [*sorted(found), "graph"]


def _levels(incomplete: str) -> list[str]:
    """The last of a list by commas."""
    before, comma, _ = incomplete.rpartition(",")
    return [before + comma + level for level in LEVELS if level not in before.split(",")]


def _manifest() -> Mapping[str, Any]:
    """Of the artifact that the line names; empty where it names none."""
    for word in words():
        with suppress(OSError, ValueError, RecursionError, RuntimeError):
            with open(Path(word).expanduser() / "manifest.json", "rb") as file:
                found = json.loads(file.read(MOST_BYTES))
            return found if isinstance(found, Mapping) else {}
    return {}


def _escaped(word: str) -> str:
    """As bash reads it: typer's script inserts it as it is."""
    return "".join(f"\\{c}" if c in " \t'\"$`&;()<>|*?[]{}!#" else c for c in word)


VALUES: dict[str, Values] = {
    "engine": _artifacts,
    "target": _targets,
    "dtype": lambda incomplete: ("f32", "bf16"),
    "block": lambda incomplete: ("8", "16", "32", "64"),
    "isa": _levels,
    "ir": _stages,
    "diff": _stages,
}


def check_shell(option: str) -> None:
    """Raises OctavoError where typer would not know for which shell it is asked."""
    import shellingham

    from runtime.errors import OctavoError

    try:
        shell = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        shell = "this shell"
    if shell not in SHELLS:
        todo = f"Run it from {', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
        raise OctavoError(f"{shell} is not known", where=option, todo=todo)
