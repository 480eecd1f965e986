"""What weights and literals alone make: copied into a graph of its own, and evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.graph import Arg, Op, Value
from ir.interpret import Array, InterpretError, WeightReader, interpret
from ir.ops import InferError


class NotStatic(ValueError):
    """It depends on an input, or on data that is not at hand."""


@dataclass
class Copy:
    """A graph of its own, into which comes what its operands are made from."""

    builder: GraphBuilder
    producer: Callable[[Arg], Op | None]
    _copied: dict[str, Value] = field(default_factory=dict[str, Value])
    _own: dict[int, Value] = field(default_factory=dict[int, Value])  # by their identity

    @staticmethod
    def named(name: str, producer: Callable[[Arg], Op | None]) -> Copy:
        return Copy(GraphBuilder(name, {}), producer)

    def emit(self, kind: str, *args: Arg, **attrs: Any) -> Value:
        """Raises NotStatic where an operand is made from an input, InferError."""
        made = self.builder.op(kind, *map(self._copy, args), several=False, **attrs)
        self._own[id(made)] = made
        return made

    def evaluate(self, value: Value, read: WeightReader | None) -> Array:
        """What an emitted value is. Raises NotStatic."""
        if read is None:
            raise NotStatic("it is read from data that only a compile from a checkpoint has")
        try:
            (found,) = interpret(self.builder.graph([value]), {}, read).outputs
        except InterpretError as error:
            raise NotStatic(str(error)) from None
        return np.asarray(found)

    def _copy(self, arg: Arg) -> Arg:
        if not isinstance(arg, Value) or id(arg) in self._own:
            return arg
        if arg.name not in self._copied:
            op = self.producer(arg)
            if op is None:
                raise NotStatic(f"it depends on the input %{arg.name}")
            made = self.builder.op(op.kind, *map(self._copy, op.args), several=True, **op.attrs)
            self._copied |= {out.name: copy for out, copy in zip(op.outs, made, strict=True)}
        return self._copied[arg.name]


def is_positive(arg: Arg, producer: Callable[[Arg], Op | None], read: WeightReader | None) -> bool:
    """Whether every element of an operand is known, finite and above 0."""
    copy = Copy.named("static", producer)
    try:
        found = copy.evaluate(copy.emit("cast", arg, dtype="f32"), read)
    except (NotStatic, InferError):
        return False
    return bool(np.isfinite(found).all() and (found > 0).all())
