"""One line per error, and the exit code that says whose fault it was."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compiler.cli.usage import UsageError, usage
from compiler.errors import CompilerFault
from runtime.errors import ArtifactError, OctavoError, shorten

BAD_INPUT = 2
OUR_FAULT = 1
LEVELS = ("0", "1", "2", "3", "4", "5")  # of DEBUG
COMPILE_LIBRARIES = ("torch", "transformers", "accelerate", "gguf", "onnx", "sympy", "networkx", "ml_dtypes")
REPORT = "This is a fault of Octavo's: report it, with what DEBUG=1 adds and the files of --dump-ir DIR"
RENAMED = {"n": "-n", "timeout_s": "--timeout"}  # other options are called as in Python, with dashes
OPTIONS = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "logprobs", "n", "beams",
    "length_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "timeout_s", "target", "threads", "isa", "kv_memory", "kv_blocks", "swap_memory", "max_step_tokens",
    "max_requests", "max_context", "length", "dump_ir", "digest", "draft", "acceptance", "max_draft_tokens",
)  # fmt: skip
_VALUE = re.compile(rf"({'|'.join(OPTIONS)}) ?= ?(.*)", re.DOTALL)  # a refused value
_LONG = "|".join(name for name in OPTIONS if "_" in name)
_NAMES = re.compile(rf"\b(?:({_LONG})\b(?: ?= ?)?|({'|'.join(OPTIONS)}) = )")  # a short one is a word, too


@dataclass(frozen=True)
class Said:
    """What the command says of an error. shown: lines that help to see it."""

    kind: str
    what: str
    where: str = ""
    todo: str = ""
    shown: str = ""
    code: int = BAD_INPUT

    @property
    def line(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}. {self.todo}." if self.todo else head

    @property
    def json(self) -> str:
        fields = {"kind": self.kind, "what": self.what, "where": self.where, "todo": self.todo}
        return json.dumps({"error": fields})


def debug_level() -> int:
    """The level of the environment variable DEBUG, 0 where unset or no level."""
    text = os.environ.get("DEBUG", "") or "0"
    return int(text) if text in LEVELS else 0


def check_debug() -> None:
    """Say of a DEBUG that is no level that nobody reads it so."""
    text = os.environ.get("DEBUG", "")
    if text and text not in LEVELS:
        print(f"octavo: DEBUG={shorten(text)!r} is no level from 0 to 5: it counts as 0", file=sys.stderr)


def report(error: BaseException, args: Sequence[str] = ()) -> int:
    """Say an error on stderr, with its traceback where DEBUG is set, and return the exit code.

    args: the command line. With --json the error's parts go to stdout too.
    """
    said = say(error, args[0] if args and not args[0].startswith("-") else "")
    with suppress(OSError):  # of a full disk: the code says it still
        if debug_level():
            traceback.print_exception(error)
        print(f"{_prefix()} {said.line}", file=sys.stderr)
        if said.shown:
            print(said.shown, file=sys.stderr)
    if "--json" in (args[: args.index("--")] if "--" in args else args):
        with suppress(OSError):
            print(said.json, flush=True)
    return said.code


def describe(error: BaseException) -> str:
    """The error's line."""
    return say(error).line


def say(error: BaseException, command: str = "") -> Said:
    """command: the subcommand that was called."""
    kind = type(error).__name__
    if isinstance(error, CompilerFault):
        return _said(kind, error.what, error.where, REPORT, error.shown, OUR_FAULT)
    if isinstance(error, OctavoError):
        shown = getattr(error, "shown", "")
        if isinstance(error, ArtifactError) and error.where != "load":  # it has fields, and no options
            return _said(kind, error.what, error.where, _compile_first(error.where) or error.todo, shown)
        what, where = _typed(error.what, error.where)
        return _said(kind, what, where, _named(error.todo), shown)
    if isinstance(error, UsageError):
        return _said(kind, *usage(error, command))
    if isinstance(error, OSError):
        return _said(kind, *_system(error))
    if isinstance(error, MemoryError):
        return _said(kind, "memory ran out", "this machine", "Free some, or ask for less")
    if isinstance(error, ModuleNotFoundError) and _is_of_the_compiler(error):
        todo = "Install the compiler: pip install 'octavo[compile]'"
        return _said(kind, "this Python package is needed", str(error.name), todo)
    return _said(kind, f"{kind}: {error}", "internal error", REPORT, code=OUR_FAULT)


def _compile_first(where: str) -> str:
    """What to do with a checkpoint that was given for an artifact; "" where it is none."""
    path = Path(where)
    with suppress(OSError, ValueError):
        if (path.suffix in (".gguf", ".onnx") and path.is_file()) or (path / "config.json").is_file():
            return f"This is a checkpoint: compile it first, octavo compile {where} -o NAME.octavo"
    return ""


def _said(
    kind: str, what: str, where: str = "", todo: str = "", shown: str = "", code: int = BAD_INPUT
) -> Said:
    return Said(kind, _joined(what), _printed(where), _joined(todo), shown, code)


def _joined(text: str) -> str:
    """A sentence of one line, without its end."""
    line = _printed(" ".join(filter(None, (part.strip() for part in text.split("\n")))))
    return line if line.endswith("...") else line.removesuffix(".")


def _printed(text: str) -> str:
    """With an escape for what a terminal would act on."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _typed(what: str, where: str) -> tuple[str, str]:
    """A refused value under the option as it was typed."""
    found = _VALUE.fullmatch(what)
    if found is not None:
        return f"it cannot be {found[2]}", _option(found[1])
    return _named(what), _option(where) if where in OPTIONS else _named(where)


def _named(text: str) -> str:
    """A text with options as they are typed: kv_memory is --kv-memory."""
    return _NAMES.sub(lambda name: _option(name[1] or name[2]) + " " * (name[0][-1] in "= "), text)


def _option(name: str) -> str:
    return RENAMED.get(name) or f"--{name.replace('_', '-')}"


def _system(error: OSError) -> tuple[str, str, str]:
    """Of a path, a full disk, a device."""
    what = error.strerror or str(error) or type(error).__name__
    where = str(error.filename) if error.filename is not None else "this machine"
    todo = "Free some space" if error.errno == 28 else "Check the path and its permissions"
    return what, where, todo


def _is_of_the_compiler(error: ModuleNotFoundError) -> bool:
    """Whether a library of the `compile` extra is missing, as it is where only the runtime was installed."""
    return (error.name or "").split(".")[0] in COMPILE_LIBRARIES


def _prefix() -> str:
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return "\033[1;31moctavo:\033[0m" if colour else "octavo:"
