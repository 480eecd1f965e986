"""The base of every error that a user of the compiler can cause."""

from __future__ import annotations


class CompileError(Exception):
    """What was wrong, where, and what to do next. The command exits with code 2 and prints just this."""
