"""Mutations of bytes and of JSON: of valid inputs, so that cases get past the first check."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

POWERS = (2, 4, 6, 7, 8, 12, 16, 20, 24, 31, 32, 40, 48, 53, 60, 63, 64, 100)
INTERESTING = (0, 1, 3, -1, -2, *(s * 2**n + d for n in POWERS for s in (1, 1, -1) for d in (0, -1)))
TEXTS = (
    *("", "a", "..", ".", "/", "../x", "../outside/secret", "/etc/passwd", "a/../../x", "x\0y", "x\ny"),
    *("\x1b[31mred", "é" * 3, "\U0001f600", "\u202egnp", "A" * 300, "A" * 5000, "NaN", "-1", "__proto__"),
    *("__class__", "{{7*7}}", "%s%n", "f32", "*/ int main(){}", '"); import os #', "con\\..\\x", "Infinity"),
    "model.safetensors",
)


def integer(rng: Random) -> int:
    return rng.choice(INTERESTING) + rng.choice((0, 0, 0, 1, -1, 64, rng.randrange(100)))


def value(rng: Random, depth: int = 0) -> Any:
    """Any JSON value, and some that Python's reader takes beyond them."""
    makers: list[Callable[[], Any]] = [
        lambda: integer(rng), lambda: integer(rng), lambda: rng.choice(TEXTS), lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice((0.0, -0.0, 0.5, 1e-300, 1e308, -1e30, float("nan"), float("inf"), 3.0)),
        lambda: {}, lambda: [],
    ]  # fmt: skip
    if depth < 2:
        makers.append(lambda: [value(rng, depth + 1) for _ in range(rng.randrange(5))])
        makers.append(lambda: {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(4))})
    return rng.choice(makers)()


def mutated(rng: Random, tree: Any, times: int | None = None) -> Any:
    """A copy of a JSON value with some of its parts replaced, removed, repeated, moved or nested."""
    tree = {"": copy.deepcopy(tree)}
    for _ in range(rng.choice((1, 1, 1, 2, 3)) if times is None else times):
        with suppress(RecursionError):
            _mutate(rng, *rng.choice(_places(tree)), _places(tree))
    return tree[""]


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in it."""
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        at = waiting.pop()
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        found += [(at, key) for key in keys]
        waiting += [at[key] for key in keys if isinstance(at[key], dict | list)]
    return found


def _mutate(rng: Random, at: Any, key: Any, others: Sequence[tuple[Any, Any]]) -> None:
    old = at[key]
    choice = rng.randrange(10)
    if choice < 3 and isinstance(old, int | float):
        at[key] = old + rng.choice((1, -1, 16, -16, old, 0.5)) if rng.random() < 0.5 else integer(rng)
    elif choice < 6:
        at[key] = value(rng)
    elif choice == 6 and key != "":
        del at[key]
    elif choice == 7:  # another part's value
        other, name = rng.choice(others)
        at[key] = (
            copy.deepcopy(other[name])
            if name in other or isinstance(other, list) and name < len(other)
            else 0
        )
    elif choice == 8 and isinstance(old, list) and old:
        at[key] = old * rng.choice((2, 3, 100)) if rng.random() < 0.7 else old[::-1]
    elif choice == 8 and isinstance(old, dict):
        old[rng.choice(TEXTS)] = value(rng)
    elif isinstance(old, str):
        at[key] = text(rng, old)
    else:
        at[key] = nested(rng, old)


def nested(rng: Random, inner: Any) -> Any:
    for _ in range(rng.choice((1, 2, 60, 900))):
        inner = [inner] if rng.random() < 0.5 else {"a": inner}
    return inner


def text(rng: Random, old: str) -> str:
    """A text with a few characters changed."""
    at = rng.randrange(len(old) + 1)
    piece = rng.choice((*TEXTS, *"/.\\\0\x1b\"'{}[]()%@:;,#\n\t 09aZ"))
    return old[:at] + piece + old[at + rng.choice((0, 0, 1, len(old))) :]


def plain_json(tree: Any, *, ensure_ascii: bool = True) -> bytes:
    try:
        return json.dumps(tree, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass")
    except (RecursionError, ValueError):  # ValueError: of a tree that mutations put into itself
        return b"[" * 5000


def raw_json(rng: Random, tree: Any) -> bytes:
    """Its bytes; sometimes spelled as no writer would."""
    data = plain_json(tree, ensure_ascii=rng.random() < 0.5)
    choice = rng.randrange(60)
    if choice == 0:
        data = data.replace(b": ", b": " + b"9" * rng.choice((20, 5000, 300_000)) + b"e", 1)
    elif choice == 1:
        data = data.replace(b"{", b'{"a": 1, "a": 2, ', 1)
    elif choice == 2:
        data = b"\xef\xbb\xbf" + data
    elif choice == 3:
        data = data.decode("utf-8", "replace").encode("utf-16")
    elif choice == 4:
        data = b"[" * rng.choice((1000, 200_000)) + data
    elif choice == 5:
        data = data.replace(b": ", b": " + b"1" * rng.choice((4000, 5000, 1_000_000)), 1)
    elif choice == 6:
        data = flipped(rng, data)
    return data


def flipped(rng: Random, data: bytes, within: int | None = None) -> bytes:
    """Bytes with some changed, cut out, inserted, repeated or cut off; within: at the start alone."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        most = min(len(found), within or len(found))
        at = rng.randrange(most + 1)
        choice = rng.randrange(8)
        if choice < 2 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif choice == 2 and at < len(found):
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif choice == 3:
            width = rng.choice((2, 4, 8))
            number = integer(rng) % (1 << 8 * width)
            found[at : at + width] = number.to_bytes(width, rng.choice(("little", "little", "big")))
        elif choice == 4:
            del found[at : at + rng.choice((1, 4, 8, 64))]
        elif choice == 5:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 8, 64)))
        elif choice == 6:
            start = rng.randrange(most + 1)
            found[at:at] = found[start : start + rng.choice((4, 16, 256))]
        elif rng.random() < 0.3:
            del found[at:]
    return bytes(found)


def replace_by_link(rng: Random, path: Path, outside: Path) -> None:
    """Put a symbolic link in a file's place: to itself elsewhere, to a secret, to nothing, a loop."""
    data = path.read_bytes()
    path.unlink()
    target = rng.choice((outside, outside / "secret", Path("/etc/passwd"), path, Path("/nowhere")))
    if target == outside:
        target = outside / path.name
        target.write_bytes(data)
    path.symlink_to(target)
