"""The base of every error that a user of the compiler can cause."""

from __future__ import annotations

from runtime.errors import OctavoError


class CompileError(OctavoError):
    """What was wrong, where (a file, an op and its place in the model, an option), and what to do next.

    The command exits with code 2 and prints just this.
    """
