"""Passes as text: `canonicalize,page_kv{block=16}`. Options are the fields of the pass's dataclass."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, get_type_hints

from compiler.errors import CompileError
from passes.base import Pass, pass_name

_ITEM = re.compile(r"\s*(?P<name>[a-z][a-z0-9_]*)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?P<end>,|$)")
_READERS: dict[Any, Any] = {
    int: int,
    float: float,
    str: str,
    bool: {"true": True, "false": False}.__getitem__,
}


def parse_passes(text: str, known: Iterable[type[Pass]]) -> list[Pass]:
    """The passes that a text names, in order. Raises CompileError naming what is unknown."""
    kinds = {pass_name(kind): kind for kind in known}
    found: list[Pass] = []
    at = 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None or (item["end"] and item.end() == len(text)):
            raise CompileError(
                f"not a list of passes from {text[at:]!r} on",
                where=f"-p {text!r}",
                todo="Write name,name{option=value}",
            )
        if item["name"] not in kinds:
            what = f"there is no pass {item['name']!r}"
            raise CompileError(what, where="-p", todo="octavo opt --list names them")
        kind = kinds[item["name"]]
        options = _options(kind, item["options"] or "")
        try:
            found.append(kind(**options))
        except ValueError as error:
            todo = "octavo opt --list shows the options"
            raise CompileError(str(error), where="-p", todo=todo) from error
        at = item.end()
    return found


def _options(kind: type[Pass], text: str) -> dict[str, Any]:
    types = get_type_hints(kind)
    names = [f.name for f in fields(kind) if _members(types[f.name])]
    found: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, sign, value = (s.strip() for s in part.partition("="))
        if not sign or name not in names:
            todo = f"It has: {', '.join(names) or 'none'}"
            raise CompileError(f"no option {part!r}", where=f"-p {pass_name(kind)}", todo=todo)
        found[name] = _value(kind, name, types[name], value)
    return found


def _value(kind: type[Pass], name: str, type: Any, text: str) -> Any:
    for member in _members(type):
        try:
            return _READERS[member](text)
        except (ValueError, KeyError):
            continue
    raise CompileError(
        f"option {name}={text!r} is not of type {getattr(type, '__name__', type)}",
        where=f"-p {pass_name(kind)}",
        todo="octavo opt --list shows the options",
    )


def _members(type: Any) -> list[Any]:
    """The types that an option of this type can be read as; none where it cannot be written as text."""
    return [member for member in getattr(type, "__args__", (type,)) if member in _READERS]


def describe(kind: type[Pass]) -> str:
    """A pass, its options with their defaults, and the first line of what it says about itself."""
    types = get_type_hints(kind)
    options = ",".join(f"{f.name}={_default(f.default)}" for f in fields(kind) if _members(types[f.name]))
    title = (sys.modules[kind.__module__].__doc__ or "").strip().split("\n")[0]
    return f"{pass_name(kind)}{'{' + options + '}' if options else ''}\n    {title}"


def _default(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
