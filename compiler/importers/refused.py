"""The error of everything that imports."""

from __future__ import annotations

from compiler.errors import CompileError


class ImportRefused(CompileError):
    """A model cannot be imported: what, where in the model, and what to do next."""
