"""What a graph's inputs are: token ids, positions, a padding mask of ones, and a past that is empty.

The model is imported for one sequence from its first token on: the past has no tokens, and nothing is padded.
What the runtime's cache does with later tokens is then proved from that by the passes, as for any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compiler.importers.onnx.context import Held, Known
from compiler.importers.onnx.formula import axis, formula
from compiler.importers.onnx.tensors import computed, element_type
from compiler.importers.refused import ImportRefused
from ir.dims import Dim, symbol
from ir.graph import Value
from ir.ops.base import MAX_SIZE
from ir.types import DType
from runtime.errors import shown

LENGTH = symbol("S")
IDS = ("input_ids", "ids", "tokens", "idx", "x", "input")
TODO = "Export it with input_ids [batch, sequence], attention_mask, position_ids and past_key_values"
Axes = Sequence[int | str]


def axes_of(info: Any, where: str) -> tuple[DType, list[int | str]]:
    """The type and the axes of an input, those that are not fixed by name."""
    kind = info.type.tensor_type
    if not info.type.HasField("tensor_type") or not kind.HasField("shape"):
        raise ImportRefused(f"input {shown(info.name)} is no tensor of a known rank", where=where, todo=TODO)
    axes = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    return computed(element_type(kind.elem_type, f"{where}, input {shown(info.name)}")), axes


def inputs_of(infos: Sequence[Any], ids: Value, where: str) -> dict[str, Held]:
    """What each input stands for. Raises ImportRefused where one is not known, or of a fixed size."""
    axes = {info.name: axes_of(info, where) for info in infos}
    chosen = _ids(axes, where)
    found: dict[str, Held] = {}
    for name, (dtype, shape) in axes.items():
        if name == chosen:
            _check_ids(name, shape, where)
            found[name] = ids
            continue
        held = _other(name, dtype, shape)
        if held is None:
            what = f"it is not known what its input {shown(name)} {list(shape)} of {dtype} is"
            raise ImportRefused(what, where=where, todo=TODO)
        found[name] = held
    return found


def _ids(axes: dict[str, tuple[DType, list[int | str]]], where: str) -> str:
    matrices = [n for n, (dtype, shape) in axes.items() if dtype is DType.I32 and len(shape) == 2]
    named = [n for wanted in IDS for n in matrices if n == wanted]
    rest = [n for n in matrices if not _is_mask(n) and not _is_position(n)]
    if not named and len(rest) != 1:
        what = f"none of its inputs {', '.join(axes) or '(none)'} are the token ids"
        raise ImportRefused(what, where=where, todo=TODO)
    return named[0] if named else rest[0]


def _check_ids(name: str, shape: Axes, where: str) -> None:
    if isinstance(shape[1], int):
        what = f"input {shown(name)} {list(shape)} has a fixed length of {shape[1]}"
        raise ImportRefused(what, where=where, todo="Export it with a dynamic sequence axis")
    if isinstance(shape[0], int) and shape[0] != 1:
        what = f"input {shown(name)} {list(shape)} has a fixed batch of {shape[0]}"
        raise ImportRefused(what, where=where, todo="Export it with a batch of 1, or a dynamic one")


def _is_mask(name: str) -> bool:
    return "mask" in name


def _is_position(name: str) -> bool:
    return "position" in name or name in ("pos", "input_pos")


def _other(name: str, dtype: DType, shape: Axes) -> Held | None:
    if dtype.is_float and len(shape) in (4, 5) and ("past" in name or "cache" in name or "key_value" in name):
        return _empty_past(shape)
    if dtype is DType.BOOL and "cache" in name and len(shape) <= 1:
        return Known(np.zeros((1,) * len(shape), np.bool_))  # use_cache_branch: the branch without a past
    if "logits_to_keep" in name and len(shape) <= 1:
        return Known(np.zeros((1,) * len(shape), np.int64))
    if _is_position(name) and dtype is DType.I32 and len(shape) in (1, 2):
        return formula(dtype, (1, LENGTH)[2 - len(shape) :], axis(len(shape) - 1))
    if _is_mask(name) and len(shape) == 2:
        return _ones(dtype)
    return None


def _ones(dtype: DType) -> Held | None:
    sizes: tuple[Dim, ...] = (1, LENGTH)
    if dtype.is_float:
        return None
    return formula(dtype, sizes, dtype is DType.BOOL or 1)


def _empty_past(shape: Axes) -> Known | None:
    """[batch, heads, 0, size]: of the axes that are not fixed the batch is 1, the others have no elements."""
    batch = len(shape) - 4
    sizes = [1 if i == batch else 0 if isinstance(n, str) else n for i, n in enumerate(shape)]
    is_empty = 0 in sizes and shape[batch] in ("", 1) or isinstance(shape[batch], str) and 0 in sizes
    if not all(0 <= n <= MAX_SIZE for n in sizes):
        return None
    return Known(np.zeros(tuple(sizes), np.float32)) if is_empty else None
