"""The arguments of `compiler.compile` and its kin: of the right kind before anything looks into them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.errors import CompileError
from runtime.errors import shown

if TYPE_CHECKING:
    from compiler.quantization.options import Quantization

SWITCHES = ("symmetric", "invariant", "weights", "check", "cache", "force")
NAMES = ("algorithm", "activations", "kv", "draft")
MOST = 2**63  # what a number may be, far beyond what any option takes


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and isinstance(os.fspath(value), str)


def _is_folder(value: Any) -> bool:
    return value is None or (_is_path(value) and (os.path.isdir(value) or not os.path.lexists(value)))


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < MOST


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Sequence) and all(isinstance(n, str) for n in value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_real(value: Any) -> bool:
    return isinstance(value, float) or _is_number(value)


def _are_arguments(value: Any) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _or_none(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "out": (_is_path, "Give the path of the artifact to write"),
    "target": (_are_names, "Give a name, or a list of names"),
    "isa": (_or_none(_are_names), "Give a list of names, or None"),
    "dtype": (_or_none(_is_text), "Give 'f32' or 'bf16', or None"),
    "max_context": (_or_none(_is_number), "Give a number of tokens, or None"),
    "block": (_or_none(_is_number), "Give a number of tokens, or None"),
    "layer": (_or_none(_is_number), "Give a layer's number, or None"),
    "dump_ir": (_is_folder, "Give a folder for the stages, or one that is not there yet"),
    "quantize": (_is_text, "Give a format's name"),
    "keep": (_are_names, "Give a pattern, or a list of patterns"),
    "group": (_or_none(_is_number), "Give a number of inputs, or None"),
    "calibration": (_or_none(_is_path), "Give the path of a text file, or None"),
    "max_kl": (_or_none(_is_real), "Give a number of nats, or None"),
    "example_inputs": (_or_none(_are_arguments), "Give a call's arguments, a tuple or a dict, or None"),
    **dict.fromkeys(
        ("algorithm", "activations", "kv", "draft"), (_or_none(_is_text), "Give a name, or None")
    ),
    **dict.fromkeys(SWITCHES, (_is_switch, "Give True or False")),
}


def check(**given: Any) -> None:
    """Raises CompileError for the first that is of another kind."""
    for name, value in given.items():
        accepts, todo = KINDS[name]
        if not accepts(value):
            raise CompileError(f"{name} = {shown(value)}", where="compile", todo=todo)


def quantization(
    quantize: str,
    group: int | None,
    algorithm: str | None,
    symmetric: bool,
    keep: str | Sequence[str],
    activations: str | None,
    kv: str | None,
    calibration: str | Path | None,
    max_kl: float | None,
) -> Quantization:
    """What was asked for in quantisation, by its own names."""
    from compiler.quantization.options import Quantization

    rules = tuple(keep.split(",") if isinstance(keep, str) and keep else keep)
    path = None if calibration is None else Path(calibration)
    return Quantization(quantize, group, algorithm, symmetric, rules, activations, kv, path, max_kl)
