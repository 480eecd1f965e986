"""What a checkpoint calls the arrays of a model, by transformers' own tables of renamings and conversions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compiler.weights import WeightError

ONE_LAYOUT = "Keep one of them: load the checkpoint with transformers and save_pretrained(OUT)"


@dataclass(frozen=True)
class Source:
    """A stored array that another is computed from. index: what stands for * in the pattern; "" if none."""

    name: str
    pattern: str
    index: str


@dataclass(frozen=True)
class Conversion:
    """The stored arrays from which transformers' `converter` computes an array, or several.

    first: the first of these.
    """

    converter: Any
    first: str
    sources: list[Source] = field(default_factory=list)

    @property
    def targets(self) -> tuple[str, ...]:
        """The arrays that it gives."""
        patterns = self.converter.target_patterns
        return tuple(self.first.replace(patterns[0], each, 1) for each in patterns)


@dataclass(frozen=True)
class StoredNames:
    """By the model's own name of an array: the one stored as it is, or what it is computed from.

    others: by that name, whatever else is stored in its place.
    """

    plain: dict[str, str] = field(default_factory=dict)
    converted: dict[str, Conversion] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, str]:
        """The model's names of what is stored, computed arrays under their own; each with the stored name."""
        return {**{name: name for name in self.converted}, **self.plain}

    def used(self, names: Iterable[str]) -> set[str]:
        """The stored arrays that some of the model's are read from."""
        found: set[str] = set()
        for name in names:
            if name in self.plain:
                found.add(self.plain[name])
            elif name in self.converted:
                found.update(source.name for source in self.converted[name].sources)
        return found

    def check_single(self, names: Iterable[str], where: str) -> None:
        """Raises WeightError where one of the model's arrays is stored twice. where: the checkpoint."""
        for name in names:
            if name in self.others:
                first = self.plain.get(name) or self.converted[name].sources[0].name
                what = f"{name!r} is stored twice, as this and from {first!r}"
                raise WeightError(what, where=f"{where}, tensor {self.others[name][0]!r}", todo=ONE_LAYOUT)


def stored_names(model: Any, stored: Iterable[str]) -> StoredNames:
    """How a checkpoint with the names `stored` has the arrays of a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    known = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    found, first = StoredNames(), dict[str, Conversion]()
    for name in sorted(stored, key=_numbers_in_order):
        own, pattern = _renamed(name, renamings, converters, model.base_model_prefix, known)
        if own not in known:  # as a buffer that is computed, which older checkpoints hold too
            continue
        if pattern is None:
            _add_plain(found, own, name)
            continue
        conversion = first.setdefault(own, Conversion(of_pattern[pattern], own))
        conversion.sources.append(_source(name, pattern, renamings))
    for conversion in first.values():
        for own in conversion.targets:
            if own in found.plain or own in found.converted:
                found.others.setdefault(own, []).append(conversion.sources[0].name)
            found.converted.setdefault(own, conversion)
    return found


def _renamed(
    name: str, renamings: Sequence[Any], converters: Sequence[Any], prefix: str, known: dict[str, Any]
) -> tuple[str, str | None]:
    """The model's name and the pattern of the converter that has to be applied, as transformers loads it."""
    from transformers.core_model_loading import rename_source_key

    own, pattern = rename_source_key(name, list(renamings), list(converters), prefix, known)
    if own not in known and name in known:
        return rename_source_key(name, [], [], prefix, known)
    return own, pattern


def _add_plain(found: StoredNames, own: str, name: str) -> None:
    if own in found.plain:
        found.others.setdefault(own, []).append(name)
    else:
        found.plain[own] = name


def _source(name: str, pattern: str, renamings: Sequence[Any]) -> Source:
    from transformers.core_model_loading import apply_renamings

    expression = pattern.replace("*.", r"(?P<index>.*)\.", 1).replace(
        "*.", r".*\."
    )  # as transformers reads it
    matched = re.search(expression, apply_renamings(name, list(renamings)))
    index = matched.groupdict().get("index", "") if matched else ""
    return Source(name, pattern, index or "")


def _numbers_in_order(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts experts.9 before experts.10."""
    parts = name.split(".")
    return [(0, len(p), p) if p.isascii() and p.isdigit() else (1, 0, p) for p in parts]
