"""Errors of the layers below in the one shape that users see. They know ops and files, and no options."""

from __future__ import annotations

from codegen.errors import BuildError, CodegenError
from codegen.triton import UnknownTarget
from compiler.errors import CompileError
from ir.graph import Op
from ir.text import ParseError
from ir.text.printer import print_op
from ir.verify import VerifyError
from passes.base import PassError

OF_A_MODEL = (BuildError, CodegenError, PassError, UnknownTarget)  # that what is compiled can cause
OF_A_TEXT = (ParseError, VerifyError)
CHANGE = "Rewrite that part of the model; octavo explain shows what is recognised of it"
RUNS = "Rewrite that part of the model with ops that have kernels, or compile for another --target"


def refusal(error: Exception, file: str = "") -> CompileError:
    """One of the above, with its place in the model (or the graph's file) and what to do next."""
    if isinstance(error, PassError):
        where = f"{_place(error.op, 'model')}, {error.pass_name}"
        return CompileError(
            error.reason, where=_joined(file, where), todo=_todo(error), shown=_shown(error.op)
        )
    if isinstance(error, CodegenError):
        where = _joined(file, _place(error.op, "model"))
        return CompileError(error.reason, where=where, todo=RUNS, shown=error.shown)
    if isinstance(error, BuildError):
        return CompileError(error.what, where=error.where, todo=error.todo, shown=error.said)
    if isinstance(error, ParseError):
        where = _joined(file, f"line {error.line}, column {error.column}")
        return CompileError(error.reason, where=where, todo="docs/ir.md describes the text")
    if isinstance(error, VerifyError):
        where = _joined(file, _place(error.op, "graph"))
        return CompileError(error.reason, where=where, todo="docs/ir.md has the rules", shown=error.shown)
    return CompileError(str(error), where="--target", todo="Choose one of those")


def _joined(file: str, where: str) -> str:
    return f"{file}, {where}" if file else where


def _place(op: Op | None, otherwise: str) -> str:
    """An op's place in the model, or what it makes where that is not known."""
    if op is None:
        return otherwise
    return op.loc or ", ".join(f"%{out.name}" for out in op.outs)


def _shown(op: Op | None) -> str:
    return "" if op is None else f"  {print_op(op).strip()}"


def _todo(error: PassError) -> str:
    hint = error.hint.rstrip(".")
    return hint[:1].upper() + hint[1:] if hint else CHANGE
