"""How an op is declared: once, with operands, attributes, inference, a numpy reference and traits.

Parser, printer, verifier, interpreter and builder derive everything they do from this declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ir.dims import Dim
from ir.graph import Attr, Scalar
from ir.types import KV, DType, Tensor, Type

ArgType = Type | Scalar | None
Array = np.ndarray[Any, np.dtype[Any]]


class InferError(ValueError):
    """An op's operands or attributes do not fit its declaration."""


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclass(frozen=True)
class Call:
    """What `infer` sees: operand types (a literal is itself, an absent operand None) and all attributes."""

    kind: str
    types: tuple[ArgType, ...]
    attrs: Mapping[str, Attr]

    def fail(self, message: str) -> NoReturn:
        raise InferError(f"{self.kind}: {message}")

    def tensor(self, index: int) -> Tensor:
        """Operand `index`, which must be a tensor."""
        found = self.types[index] if index < len(self.types) else None
        if not isinstance(found, Tensor):
            self.fail(f"operand {index} must be a tensor, not {found!r}")
        return found

    def optional(self, index: int) -> Tensor | None:
        """Operand `index` if it is given."""
        return None if index >= len(self.types) or self.types[index] is None else self.tensor(index)

    def kv(self, index: int) -> KV:
        found = self.types[index] if index < len(self.types) else None
        if not isinstance(found, KV):
            self.fail(f"operand {index} must be a kv state, not {found!r}")
        return found

    def axis(self, rank: int, axis: Any) -> int:
        """A non-negative axis below rank."""
        if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis < rank:
            self.fail(f"axis {axis!r} is not in 0..{rank - 1}")
        return axis


@dataclass(frozen=True)
class RefCall:
    """What a reference sees: concrete operands, attributes with sizes filled in, the float type to compute in.

    A KV operand is a dict from stream name to an array [layers, blocks, block, heads, head_size].
    """

    kind: str
    args: tuple[Any, ...]
    attrs: Mapping[str, Attr]
    float_type: type[np.floating[Any]]

    def arg(self, index: int) -> Any:
        return self.args[index] if index < len(self.args) else None


Infer = Callable[[Call], tuple[Type, ...]]
Reference = Callable[[RefCall], Sequence[Any]]


@dataclass(frozen=True)
class OpDef:
    """One op kind.

    operands: names; a trailing `?` is optional, a trailing `*` takes the rest.
    attrs: defaults, or REQUIRED. A default of None means "may be left out".
    pointwise: result element [i] depends on operand elements [i] alone (after broadcasting).
    sequence_aware: knows which request a token belongs to; every other op must treat tokens independently.
    rollback: how the op's state goes back when tokens are rejected: "truncate", or None where it keeps no state.
    """

    kind: str
    operands: tuple[str, ...]
    infer: Infer
    reference: Reference
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pointwise: bool = False
    sequence_aware: bool = False
    rollback: str | None = None

    @property
    def num_required(self) -> int:
        return sum(1 for name in self.operands if name[-1] not in "?*")

    @property
    def variadic(self) -> bool:
        return bool(self.operands) and self.operands[-1].endswith("*")

    def complete(self, attrs: Mapping[str, Attr]) -> dict[str, Attr]:
        """The attributes with defaults filled in. Raises InferError on an unknown or missing one."""
        for name in attrs:
            if name not in self.attrs and name not in ANNOTATIONS:
                raise InferError(f"{self.kind}: no attribute {name!r}; it has {sorted(self.attrs)}")
        full = {name: attrs.get(name, default) for name, default in self.attrs.items()}
        for name, value in full.items():
            if value is REQUIRED:
                raise InferError(f"{self.kind}: attribute {name!r} is required")
        return full

    def infer_types(self, types: tuple[ArgType, ...], attrs: Mapping[str, Attr]) -> tuple[Type, ...]:
        """Result types. Raises InferError."""
        most = None if self.variadic else len(self.operands)
        if len(types) < self.num_required or (most is not None and len(types) > most):
            raise InferError(
                f"{self.kind}: takes {', '.join(self.operands) or 'nothing'}; got {len(types)} operands"
            )
        for name, given in zip(self.operands, types, strict=False):
            if given is None and name[-1] not in "?*":
                raise InferError(f"{self.kind}: operand {name} is required")
        return self.infer(Call(self.kind, types, self.complete(attrs)))


ANNOTATIONS = frozenset({"group", "at"})


def broadcast(call: Call, shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """numpy's broadcasting rule over symbolic sizes: sizes are equal, or one of them is 1."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = []
    for column in zip(*(((1,) * (rank - len(s)) + tuple(s)) for s in shapes), strict=True):
        sizes = {d for d in column if d != 1}
        if len(sizes) > 1:
            call.fail(f"shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def common_dtype(call: Call, first: int = 0) -> DType:
    """The one element type of the tensor operands from `first` on."""
    kinds = {t.dtype for t in call.types[first:] if isinstance(t, Tensor)}
    if len(kinds) != 1:
        call.fail(f"operands must have one element type, not {sorted(kinds)}")
    return kinds.pop()
