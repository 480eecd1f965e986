"""How a module's forward is called: what of its arguments are token ids, positions, masks and constants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from compiler.importers.refused import ImportRefused

IDS = ("ids", "input_ids", "tokens", "idx", "x")
POSITIONS = ("pos", "positions", "position_ids", "input_pos")

WRAP = "Wrap it in a module whose forward takes ids [1,S] and, if it needs them, positions [1,S]"
EXAMPLE = f"Give it in example_inputs; or {WRAP[0].lower()}{WRAP[1:]}"


class Given(Enum):
    """An argument that the runtime gives, int64 [1, S]."""

    IDS = "ids"
    POSITIONS = "positions"


@dataclass(frozen=True)
class Ones:
    """A padding mask [1, S] of one sequence, in which nothing is padded. dtype: torch's."""

    dtype: Any


@dataclass(frozen=True)
class Constant:
    value: Any


Argument = Given | Ones | Constant


@dataclass(frozen=True)
class Call:
    """What stands for each argument, by place and by keyword."""

    args: Sequence[Argument]
    kwargs: Mapping[str, Argument]

    @property
    def takes_positions(self) -> bool:
        return Given.POSITIONS in (*self.args, *self.kwargs.values())

    def logits(self, module: Any, ids: Any, pos: Any) -> Any:
        """Those that the module gives for ids and positions [1, S], whatever it wraps them in."""
        import torch

        def made(argument: Argument) -> Any:
            if isinstance(argument, Given):
                return ids if argument is Given.IDS else pos
            if isinstance(argument, Ones):
                return torch.ones_like(ids, dtype=argument.dtype)
            return argument.value

        out = module(*map(made, self.args), **{name: made(each) for name, each in self.kwargs.items()})
        if isinstance(out, Mapping) and "logits" in out:
            return out["logits"]
        out = getattr(out, "logits", out)
        return out[0] if isinstance(out, tuple | list) else out


def call_by_signature(module: Any) -> Call:
    """Ids come first or by a name of theirs; positions are given if they are required, or come second under a
    name of theirs. Raises ImportRefused on what else is required."""
    given = list(inspect.signature(module.forward).parameters.values())
    named = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in given if p.kind is p.KEYWORD_ONLY]
    first = named[0] if named else next((p for p in keywords if p.name in IDS), None)
    if first is None and all(p.kind is not p.VAR_POSITIONAL for p in given):
        raise ImportRefused("it takes no token ids", where=f"{type(module).__name__}.forward", todo=WRAP)
    others = [p for p in (*named, *keywords) if p is not first]
    required = [p for p in others if p.default is p.empty]
    pos = next((p for p in others if p.name in POSITIONS and (p in required or p is others[0])), None)
    if pos is None and required and required[0] in named[1:2]:
        pos = required[0]
    refused = next((p for p in required if p is not pos), None)
    if refused is not None:
        what = f"it needs {refused.name!r} besides ids and positions"
        raise ImportRefused(what, where=f"{type(module).__name__}.forward", todo=EXAMPLE)
    args, kwargs = list[Argument](), dict[str, Argument]()
    for parameter, argument in ((first, Given.IDS), (pos, Given.POSITIONS)):
        if parameter in keywords or (parameter is pos and pos is not None and pos not in named[1:2]):
            kwargs[parameter.name] = argument  # type: ignore[union-attr]
        elif parameter is not None or argument is Given.IDS:
            args.append(argument)
    kwargs.update({p.name: Constant(False) for p in others if p.name == "use_cache"})
    return Call(args, kwargs)


def call_by_example(module: Any, examples: Sequence[Any] | Mapping[str, Any]) -> Call:
    """examples: a call's arguments, by place or by keyword. The first matrix of integers [B, S], or the one
    with a name of theirs, are ids; one with a name of theirs, or that counts from 0 in each row, positions;
    one that is all ones a padding mask. What is no tensor is the same in every call. Raises ImportRefused.
    """
    import torch

    where = f"{type(module).__name__}, example_inputs"
    by_keyword = isinstance(examples, Mapping)
    pairs: list[tuple[str, Any]] = (
        [(str(n), v) for n, v in examples.items()]
        if isinstance(examples, Mapping)
        else list(zip(_names(module, len(examples)), examples, strict=True))
    )
    matrices = [
        n for n, v in pairs if isinstance(v, torch.Tensor) and v.ndim == 2 and not v.is_floating_point()
    ]
    ids = next((n for n in matrices if n in IDS), next(iter(matrices), None))
    if ids is None:
        raise ImportRefused("no token ids, a matrix of integers, among them", where=where, todo=WRAP)
    found = [(n, Given.IDS if n == ids else _argument(n, v, where)) for n, v in pairs]
    if sum(argument is Given.POSITIONS for _, argument in found) > 1:
        raise ImportRefused("several of them look like positions", where=where, todo=WRAP)
    return Call((), dict(found)) if by_keyword else Call([argument for _, argument in found], {})


def _names(module: Any, count: int) -> list[str]:
    """Those of the arguments that are given by place."""
    given = inspect.signature(module.forward).parameters.values()
    named = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return [*named, *(f"argument {i}" for i in range(len(named), count))]


def _argument(name: str, value: Any, where: str) -> Argument:
    import torch

    if not isinstance(value, torch.Tensor):
        return Constant(value)
    if value.ndim == 2 and value.numel():
        counts = torch.arange(value.shape[1]).expand(value.shape)
        if name in POSITIONS or torch.equal(value.cpu().long(), counts):
            return Given.POSITIONS
        if bool((value == 1).all()):
            return Ones(value.dtype)
    what = f"{name!r} is neither ids, nor positions, nor a mask of ones, each [batch, sequence]"
    raise ImportRefused(what, where=where, todo=WRAP)
