"""How a shell asks at Tab, and is answered: typer speaks the protocols, and bash's splitting is undone here.

A shell asks with environment variables, and waits: neither this nor the commands' modules import at their top
what takes long.
"""

from __future__ import annotations

import io
import os
import shlex
from contextlib import redirect_stdout

import typer

ASKED = "_OCTAVO_COMPLETE"  # typer's name for `octavo`
SHELLS = ("bash", "zsh", "fish")
OPTIONS = ("--install-completion", "--show-completion")


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


def _escaped(word: str) -> str:
    """As bash reads it: typer's script inserts it as it is."""
    return "".join(f"\\{c}" if c in " \t'\"$`&;()<>|*?[]{}!#" else c for c in word)


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
