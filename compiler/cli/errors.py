"""One line per error, and the exit code that says whose fault it was."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer

from compiler.errors import CompileError
from runtime.errors import OctavoError

BAD_INPUT = 2
OUR_FAULT = 1
COMPILE_LIBRARIES = ("torch", "transformers", "accelerate", "gguf", "onnx", "sympy", "networkx", "ml_dtypes")
_USAGE_ERROR = typer.BadParameter.__mro__[1]  # typer exports no name for it
INPUT_ERRORS = (CompileError, OctavoError, OSError, _USAGE_ERROR)  # OSError: a path, a full disk, a device


def debug_level() -> int:
    """The level of the environment variable DEBUG, 0 where unset or not a number."""
    text = os.environ.get("DEBUG", "0")
    return int(text) if text.isdigit() else 0


def report(error: BaseException) -> int:
    """Print an error to stderr, with its traceback where DEBUG is set, and return the exit code."""
    if debug_level():
        traceback.print_exception(error)
    if isinstance(error, INPUT_ERRORS) or _lacks_compiler(error):
        print(f"octavo: {describe(error)}", file=sys.stderr)
        return BAD_INPUT
    print(
        f"octavo: internal error: {type(error).__name__}: {error}\n"
        "This is a fault of Octavo's. DEBUG=1 shows where. A report with the --dump-ir files helps.",
        file=sys.stderr,
    )
    return OUR_FAULT


def _lacks_compiler(error: BaseException) -> bool:
    """Whether a library of the `compile` extra is missing, as it is where only the runtime was installed."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in COMPILE_LIBRARIES


def describe(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f"this needs the Python package {error.name}. Install the compiler: pip install 'octavo[compile]'"
        )
    if isinstance(error, _USAGE_ERROR):
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context else "octavo"
        said: str = getattr(error, "format_message")()  # noqa: B009 - of a class without a public name
        return f"{' '.join(said.split()).removesuffix('.')}. See {path} --help."
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"{error.filename}: {error.strerror or type(error).__name__}. Check the path and its permissions."
        )
    return str(error)
