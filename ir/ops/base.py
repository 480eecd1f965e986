"""How an op is declared: once, with operands, attributes, inference, a numpy reference and traits.

Parser, printer, verifier, interpreter and builder derive everything they do from this declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy as np
import sympy

from ir.dims import Dim, is_condition, normalize
from ir.graph import Attr, Scalar
from ir.types import KV, DType, Tensor, Type

MAX_SIZE = 2**63 - 1
ELEMENT_TYPES = frozenset(str(d) for d in DType)

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
        if type(axis) is not int or not 0 <= axis < rank:
            self.fail(f"axis {axis!r} is not in 0..{rank - 1}")
        return axis

    def floats(self) -> DType:
        """The one element type of the operands, which must be a float type."""
        dtype = common_dtype(self)
        if not dtype.is_float:
            self.fail(f"needs float operands, not {dtype}")
        return dtype

    # --- attributes, checked

    def integer(self, name: str, low: int = 0) -> int:
        value = self.attrs[name]
        if type(value) is not int or not low <= value <= MAX_SIZE:
            self.fail(f"attribute {name} must be an integer from {low}, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.attrs[name]
        if type(value) is not bool:
            self.fail(f"attribute {name} must be true or false, not {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.attrs[name]
        if type(value) not in (int, float):
            self.fail(f"attribute {name} must be a number, not {value!r}")
        return float(value)

    def dtype(self, name: str = "dtype") -> DType:
        value = self.attrs[name]
        if not isinstance(value, str) or value not in ELEMENT_TYPES:
            self.fail(f"attribute {name} must be one of {sorted(ELEMENT_TYPES)}, not {value!r}")
        return DType(value)

    def float_dtype(self, default: DType) -> DType:
        """Attribute dtype, which must be a float type, or `default` where it is left out."""
        found = default if self.attrs["dtype"] is None else self.dtype()
        if not found.is_float:
            self.fail(f"attribute dtype must be a float type, not {found}")
        return found

    def size(self, name: str) -> Dim:
        return self._size(name, self.attrs[name])

    def sizes(self, name: str) -> tuple[Dim, ...]:
        value = self.attrs[name]
        if not isinstance(value, tuple):
            self.fail(f"attribute {name} must be a list of sizes, not {value!r}")
        return tuple(self._size(name, item) for item in cast("tuple[Any, ...]", value))

    def integers(self, name: str) -> tuple[int, ...]:
        found = self.sizes(name)
        if not all(isinstance(item, int) for item in found):
            self.fail(f"attribute {name} must be a list of integers, not {list(found)}")
        return cast("tuple[int, ...]", found)

    def _size(self, name: str, value: Any) -> Dim:
        if type(value) is int and 0 <= value <= MAX_SIZE:
            return value
        if not is_size(value):
            self.fail(f"attribute {name}: {value!r} is not a size")
        return normalize(value)


@dataclass(frozen=True)
class RefCall:
    """What a reference sees: concrete operands, attributes with sizes filled in, the float type to use.

    The interpreter has widened f16 and bf16 operands to that type, and rounds the results to theirs. A KV
    operand is a dict from stream name to an array [layers, blocks, block, heads, head_size], and from
    the names of a quantised stream's other parts to theirs (Stream.parts).
    """

    kind: str
    args: tuple[Any, ...]
    attrs: Mapping[str, Attr]
    float_type: type[np.floating[Any]]
    types: tuple[ArgType, ...] = ()  # of the operands, where what calls knows them

    def arg(self, index: int) -> Any:
        return self.args[index] if index < len(self.args) else None


def is_size(value: Any) -> bool:
    """Whether a value can be a size: no boolean, no predicate, not known to be negative."""
    if isinstance(value, int):
        return type(value) is int and 0 <= value <= MAX_SIZE
    if is_condition(value) or not isinstance(value, sympy.Expr):
        return False
    return bool(value.is_integer) and not value.is_negative


Infer = Callable[[Call], tuple[Type, ...]]
Reference = Callable[[RefCall], Sequence[Any]]


@dataclass(frozen=True)
class OpDef:
    """One op kind.

    operands: names; a trailing `?` is optional, a trailing `*` takes the rest.
    attrs: defaults, or REQUIRED. A default of None means "may be left out".
    pointwise: result element [i] depends on operand elements [i] alone (after broadcasting).
    sequence_aware: knows which request a token belongs to; every other op must treat tokens independently.
    rollback: how the op's state goes back when tokens are rejected: "truncate", or None without state.
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
        for index, given in enumerate(types):
            self._check_operand(index, given)
        return self.infer(Call(self.kind, types, self.complete(attrs)))

    def _check_operand(self, index: int, given: ArgType) -> None:
        """A state stands where the op takes one and nowhere else; only `?` operands may be absent."""
        name = self.operands[min(index, len(self.operands) - 1)]
        if given is None and not name.endswith("?"):
            raise InferError(f"{self.kind}: operand {index} ({name}) is required")
        takes_state = name.rstrip("?") in STATE_OPERANDS
        if given is not None and isinstance(given, KV) != takes_state:
            wanted = "a kv state" if takes_state else "a tensor"
            raise InferError(f"{self.kind}: operand {index} ({name}) must be {wanted}, not {given!r}")


ANNOTATIONS = frozenset({"group", "at"})
STATE_OPERANDS = frozenset({"kv", "tail"})  # names of operands that are KV states


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
    """The one element type of the tensor operands from `first` on; literals among them must fit it."""
    given = call.types[first:]
    kinds = {t.dtype for t in given if isinstance(t, Tensor)}
    if len(kinds) != 1:
        call.fail(f"operands must have one element type, not {sorted(kinds)}")
    dtype = kinds.pop()
    for scalar in given:
        if isinstance(scalar, Scalar) and not fits(scalar.value, dtype):
            call.fail(f"the literal {scalar.value!r} does not fit operands of type {dtype}")
    return dtype


def fits(value: Any, dtype: DType) -> bool:
    """Whether a literal can be an element of a type: no fraction among integers, no number among booleans."""
    if dtype is DType.BOOL or isinstance(value, bool):
        return dtype is DType.BOOL and isinstance(value, bool)
    if dtype.is_float:
        return isinstance(value, int | float) and abs(value) <= MAX_SIZE or isinstance(value, float)
    if not dtype.is_integer or not isinstance(value, int):
        return False
    low = 0 if dtype in (DType.U2, DType.U4, DType.U8) else -(1 << dtype.bits - 1)
    return low <= value < low + (1 << dtype.bits)
