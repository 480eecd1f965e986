"""A command as its source declares it: what it is told, without the imports that doing it takes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# What a declaration may use. Of these, only typer takes noticeable time.
LIGHT = ("__future__", "pathlib", "typing", "typer", "collections.abc", "compiler.cli.options")


def declared(name: str) -> Callable[..., Any]:
    """The function `command` of compiler.cli.NAME, which is imported only when it is called."""
    module = f"compiler.cli.{name}"
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    kept = [node for node in ast.parse(Path(spec.origin).read_bytes()).body if _is_declaration(node)]
    for node in kept:
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[:1]  # the docstring
    names: dict[str, Any] = {}
    exec(compile(ast.Module(kept, []), spec.origin, "exec"), names)  # our own source, and nobody's text

    @wraps(names["command"])
    def command(**options: Any) -> Any:
        return import_module(module).command(**options)

    return command


def _is_declaration(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name in LIGHT for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module in LIGHT
    return isinstance(node, ast.FunctionDef) and node.name == "command"
