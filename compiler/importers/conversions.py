"""The operations of transformers' conversions of checkpoints, as arrangements of stored arrays.

An operation takes arrays under the patterns of names that they were found by and gives arrays under such
patterns again, in the end those of the model's names: what each gives is transformers' convention, how it is
computed is said here. One that is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.importers.arrangement import (
    Arrangement,
    Concat,
    Misfit,
    Slice,
    Stack,
    Stored,
    Take,
    Transpose,
)
from compiler.importers.refused import ImportRefused
from compiler.importers.stored_names import Conversion, Source
from compiler.weights import BELONG, WeightError, WeightSource
from runtime.errors import shown

NEWER = "Load the checkpoint with transformers and save_pretrained(OUT, save_original_format=False)"
MAX_DIGITS = 9

Parts = Mapping[str, Sequence[Arrangement]]


@dataclass(frozen=True)
class _Call:
    """What an operation is applied to. shapes: of the model's arrays, by name; config: the model's."""

    conversion: Conversion
    parts: Parts
    shapes: Mapping[str, tuple[int, ...]]
    config: Any

    @property
    def targets(self) -> list[str]:
        return self.conversion.converter.target_patterns

    @property
    def single(self) -> Arrangement:
        return self._only(next(iter(self.parts.values())))

    def _only(self, found: Sequence[Arrangement]) -> Arrangement:
        if len(self.parts) != 1 or len(found) != 1:
            raise Misfit("it is one of several, where one is expected", found[-1])
        return found[0]

    @property
    def target(self) -> str:
        """The pattern of the only array that there is, which a later operation may take apart."""
        return self.targets[0] if len(self.targets) == 1 else self.conversion.converter.source_patterns[0]


def arrange(
    conversion: Conversion,
    source: WeightSource,
    shapes: Mapping[str, tuple[int, ...]],
    config: Any,
    where: str,
) -> dict[str, Arrangement]:
    """The model's arrays that a conversion gives, by name. where: the checkpoint.

    Raises ImportRefused on an operation that is not known, WeightError where the stored arrays do not fit
    together or do not give the shapes of the model's.
    """
    parts = _collected(conversion, source, shapes, where)
    for operation in conversion.converter.operations:
        apply = _OPERATIONS.get(type(operation).__name__)
        if apply is None:
            what = f"{shown(conversion.first)} has to be computed from it by {type(operation).__name__}, "
            what += "an operation that is not known here"
            raise ImportRefused(what, where=_place(where, conversion.sources[0].name), todo=NEWER)
        try:
            parts = apply(operation, _Call(conversion, parts, shapes, config))
        except Misfit as error:
            what = f"{error.what}: they are put together to {shown(conversion.first)}"
            raise WeightError(what, where=_place(where, _first_name(error.part)), todo=BELONG) from None
    return _named(conversion, parts, shapes, where)


def _collected(
    conversion: Conversion, source: WeightSource, shapes: Mapping[str, tuple[int, ...]], where: str
) -> Parts:
    """The stored arrays of each pattern, in the order of their numbers."""
    found: dict[str, Sequence[Arrangement]] = {}
    for pattern in conversion.converter.source_patterns:
        each = [s for s in conversion.sources if s.pattern == pattern]
        if not each:
            beside = conversion.sources[0].name
            what = (
                f"nothing is stored beside it as {shown(pattern)}, without which {shown(conversion.first)} "
            )
            raise WeightError(f"{what}cannot be computed", where=_place(where, beside), todo=BELONG)
        if "*." in pattern:
            each = _numbered(each, _count(conversion, shapes), conversion.first, where)
        elif len(each) > 1:
            what = f"it and {shown(each[0].name)} are both stored for {shown(conversion.first)}"
            raise WeightError(what, where=_place(where, each[1].name), todo=BELONG)
        found[pattern] = [Stored(source, s.name) for s in each]
    return found


def _count(conversion: Conversion, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """How many arrays are stacked; None where the model's array does not tell."""
    operation = conversion.converter.operations[0]
    if type(operation).__name__ != "MergeModulelist" or len(conversion.targets) != 1:
        return None
    shape = shapes[conversion.first]
    return shape[operation.dim] if operation.dim < len(shape) else None


def _numbered(each: Sequence[Source], count: int | None, target: str, where: str) -> list[Source]:
    """In order of their numbers, which must be 0, 1 and so on up to count."""
    found: dict[int, Source] = {}
    for source in each:
        number = source.index
        if (
            not (number.isascii() and number.isdigit())
            or len(number) > MAX_DIGITS
            or str(int(number)) != number
        ):
            what = f"{shown(number)} stands where its number is expected: it is one part of {shown(target)}"
            raise WeightError(what, where=_place(where, source.name), todo=BELONG)
        if int(number) in found:
            what = f"it and {shown(found[int(number)].name)} have the same number in {shown(target)}"
            raise WeightError(what, where=_place(where, source.name), todo=BELONG)
        found[int(number)] = source
    wanted = range(len(found) if count is None else count)
    missing = next((n for n in wanted if n not in found), None)
    if missing is not None:
        some = next(iter(found.values()))
        name = _with_number(some, missing)
        what = f"it is missing, the part {missing} of {len(wanted)} of {shown(target)}"
        raise WeightError(what, where=_place(where, name), todo=BELONG)
    extra = next((n for n in sorted(found) if n not in wanted), None)
    if extra is not None:
        what = f"it is one too many: the configuration makes {shown(target)} of {len(wanted)} parts"
        raise WeightError(what, where=_place(where, found[extra].name), todo=BELONG)
    return [found[n] for n in wanted]


def _with_number(source: Source, number: int) -> str:
    """The name of the array beside one that has another number."""
    before, _, after = source.name.rpartition(f".{source.index}.")
    return f"{before}.{number}.{after}" if before else f"{source.pattern} {number}"


def _named(
    conversion: Conversion, parts: Parts, shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Arrangement]:
    """The model's names of what the operations gave, with its shapes."""
    first = conversion.converter.target_patterns[0]
    found: dict[str, Arrangement] = {}
    for pattern, arrays in parts.items():
        name = conversion.first.replace(first, pattern, 1)
        found[name] = arrays[0]
        wanted = shapes.get(name)
        if wanted is not None and arrays[0].shape != wanted:
            source = conversion.sources[0].name
            made = f"{shown(name)} of the shape {list(arrays[0].shape)}, but the configuration makes it"
            what = f"it and what belongs to it make {made} {list(wanted)}"
            raise WeightError(what, where=_place(where, source), todo=BELONG)
    return found


def _first_name(array: Arrangement) -> str:
    match array:
        case Stored(_, name):
            return name
        case Stack(parts) | Concat(parts):
            return _first_name(parts[0])
        case Slice(part) | Transpose(part) | Take(part):
            return _first_name(part)
        case _:
            return ""


def _place(where: str, name: str) -> str:
    return f"{where}, tensor {shown(name)}"


def _stacked(operation: Any, call: _Call) -> Parts:
    found = {pattern: [Stack(tuple(arrays), operation.dim)] for pattern, arrays in call.parts.items()}
    return {call.targets[0]: next(iter(found.values()))} if len(found) == 1 else {**found}


def _joined(operation: Any, call: _Call) -> Parts:
    patterns = call.conversion.converter.source_patterns
    arrays = [a for pattern in patterns for a in call.parts.get(pattern, ())]
    return {call.targets[0]: [Concat(tuple(arrays), operation.dim)]}


def _chunked(operation: Any, call: _Call) -> Parts:
    """Into equal chunks; the last may be smaller, as torch.chunk has it."""
    array, axis = call.single, operation.dim
    size = array.shape[axis] if axis < len(array.shape) else 0
    step = -(-size // len(call.targets))
    cuts = [(i * step, min((i + 1) * step, size)) for i in range(len(call.targets))]
    return {t: [Slice(array, axis, *cut)] for t, cut in zip(call.targets, cuts, strict=True)}


def _split(operation: Any, call: _Call) -> Parts:
    """Into pieces of the sizes that the model's arrays have."""
    array, axis, start = call.single, operation.dim, 0
    found: dict[str, Sequence[Arrangement]] = {}
    for target, name in zip(call.targets, call.conversion.targets, strict=True):
        if name not in call.shapes:
            raise Misfit(f"a piece of it is {shown(name)}, which the model does not have", array)
        stop = start + call.shapes[name][axis]
        found[target] = [Slice(array, axis, start, stop)]
        start = stop
    if start != array.shape[axis]:
        raise Misfit(f"it has {array.shape[axis]} on axis {axis}, where {start} are to be split", array)
    return found


def _transposed(operation: Any, call: _Call) -> Parts:
    array = call.single
    if operation.check_dims and array.shape == call.shapes[call.conversion.first]:
        return {call.target: [array]}
    return {call.target: [Transpose(array, operation.dim0, operation.dim1)]}


def _deinterleaved(operation: Any, call: _Call) -> Parts:
    """Even indices of an axis, then odd ones; or back."""
    array, axis = call.single, operation.dim
    size = array.shape[axis] if axis < len(array.shape) else 1
    if size % 2:
        raise Misfit(
            f"its axis {axis} is to be taken apart in pairs, and it has the shape {list(array.shape)}", array
        )
    pairs = (2, size // 2) if operation.inverse else (size // 2, 2)
    return {call.targets[0]: [Take(array, axis, np.arange(size).reshape(pairs).T.ravel())]}


def _rotary(operation: Any, call: _Call) -> Parts:
    """Rows of each head from pairs (real, imaginary) to halves, or back."""
    config = call.config
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads = getattr(config, "num_attention_heads", 1)
    found: dict[str, Sequence[Arrangement]] = {}
    several = len(call.targets) > 1 or len(call.conversion.converter.source_patterns) > 1
    for pattern, arrays in call.parts.items():
        names = operation.permute_layer_names
        array = arrays[0]
        if names is None or any(name in pattern for name in names):
            size = array.shape[0] if array.shape else 0
            if len(array.shape) not in (1, 2) or size % (2 * heads) or not size:
                raise Misfit(
                    f"its rows are no pairs of {heads} heads: its shape is {list(array.shape)}", array
                )
            pairs = (2, size // heads // 2) if operation.inverse else (size // heads // 2, 2)
            order = np.arange(size).reshape(heads, *pairs).swapaxes(1, 2).ravel()
            array = Take(array, 0, order)
        found[pattern if several else call.targets[0]] = [array]
    return found


_OPERATIONS: dict[str, Callable[[Any, _Call], Parts]] = {
    "MergeModulelist": _stacked,
    "Concatenate": _joined,
    "Chunk": _chunked,
    "Split": _split,
    "Transpose": _transposed,
    "Interleave": _deinterleaved,
    "PermuteForRope": _rotary,
}
