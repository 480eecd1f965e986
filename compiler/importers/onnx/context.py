"""What a converter sees of the node that it converts, and the helpers that all converters share.

A value of an ONNX graph is one of four: `Known`, an array that is known now (constants, and the shapes that
exporters compute, with S among their numbers); `Formula`, a function of where an element stands; or a `Value`
or `Weight` of the IR. Nodes on the first two need no ops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from compiler.importers.onnx.formula import (
    COMPARISONS,
    SYMBOLIC,
    Formula,
    FormulaError,
    elementwise,
    formula,
)
from compiler.importers.onnx.spelling import Spelling
from compiler.importers.onnx.tensors import Stored, computed
from compiler.importers.refused import ImportRefused
from compiler.weights import Array
from ir.build import GraphBuilder
from ir.dims import Dim, normalize, upper_bound
from ir.graph import Arg, Scalar, Value, Weight
from ir.ops import OPS
from ir.ops.base import RefCall
from ir.types import DType, Tensor

MAX_KNOWN = 1 << 16  # elements of an array that is computed now
INT32_LIMIT = 2**31
_NUMPY = {np.dtype(d.numpy): d for d in DType if d.bits >= 8}

Convert = Callable[..., Any]  # of an op: a context, operands and attributes to its results


@dataclass(frozen=True)
class Known:
    """An array that is known: numbers, or (of dtype object) integers some of which are expressions of S."""

    array: Any

    @property
    def dtype(self) -> DType:
        if self.array.dtype == object:
            return DType.I32
        return computed(_NUMPY[self.array.dtype])

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def number(self) -> Any:
        """The only element: a Python number, or an expression of S."""
        return self.array.reshape(-1)[0] if self.array.dtype == object else self.array.reshape(-1)[0].item()


Held = Known | Formula | Value | Weight


@dataclass
class Shared:
    """What the nodes of one graph share. stored: arrays of the file by the graph's names; arrays: those that
    were computed; matrices: quantised ones; context: the largest S."""

    build: GraphBuilder
    context: int
    stored: Mapping[str, Stored]
    read: Callable[[str], Array]
    arrays: dict[str, Array] = field(default_factory=dict[str, Array])
    matrices: dict[str, Any] = field(default_factory=dict[str, Any])
    spelled: dict[Any, Value] = field(default_factory=dict[Any, Value])
    makers: dict[str, Any] = field(default_factory=dict[str, Any])
    constant: set[str] = field(default_factory=set[str])


@dataclass(frozen=True)
class Context:
    """One node. loc: its module's path; opset: the version of its op set; outputs: which results are read."""

    shared: Shared
    kind: str
    loc: str
    opset: int
    outputs: tuple[bool, ...] = (True,)

    # --- what a value is

    def dtype(self, x: Held) -> DType:
        return x.dtype if isinstance(x, Known | Formula) else self.type(x).dtype

    def shape(self, x: Held) -> tuple[Dim, ...]:
        return x.shape if isinstance(x, Known | Formula) else self.type(x).shape

    def type(self, x: Any) -> Tensor:
        if isinstance(x, Value | Weight) and isinstance(x.type, Tensor):
            return x.type
        raise ImportRefused(f"{x!r} is not a tensor")

    def rank(self, x: Held) -> int:
        return len(self.shape(x))

    def axis(self, x: Held, number: Any, extra: int = 0) -> int:
        rank = self.rank(x) + extra
        if not -rank <= int(number) < rank:
            raise ImportRefused(f"axis {number} of {rank}")
        return int(number) % rank

    def is_constant(self, x: Held) -> bool:
        """Whether it is computed from weights and literals alone."""
        if isinstance(x, Formula):
            return False
        return not isinstance(x, Value) or x.name in self.shared.constant

    def known(self, x: Held | None, what: str) -> Any:
        """An array that must be known now. Raises ImportRefused."""
        if isinstance(x, Formula) and x.is_constant and all(isinstance(n, int) for n in x.shape):
            return np.broadcast_to(_plain(x.expr), [int(n) for n in x.shape])  # type: ignore[arg-type]
        if isinstance(x, Weight) and (found := self.small(x)) is not None:
            return found
        if not isinstance(x, Known):
            raise ImportRefused(f"its {what} depends on the tokens, or on where they stand")
        return x.array

    def small(self, x: Weight) -> Array | None:
        """The array of a weight that is small enough to be looked at."""
        sizes = self.type(x).shape
        if x.name not in self.shared.stored or int(np.prod([int(n) for n in sizes])) > MAX_KNOWN:  # type: ignore[arg-type]
            return None
        return self.shared.read(x.name)

    def integers(self, x: Held | None, what: str) -> list[Any]:
        """A known list of sizes: integers, or expressions of S."""
        return [_plain(n) for n in np.asarray(self.known(x, what)).reshape(-1).tolist()]

    # --- ops

    def op(self, kind: str, *args: Any, several: bool = False, **attrs: Any) -> Any:
        """Append an op of the IR on values, weights and literals."""
        build = self.shared.build
        made: Any = build.op(kind, *args, name=self._name(kind), loc=self.loc, several=True, **attrs)
        if args and all(self.is_constant(a) for a in args if not isinstance(a, Scalar | None)):
            self.shared.constant.update(v.name for v in made)
        self.shared.makers.update({v.name: build.ops[-1] for v in made})
        return made if several else made[0]

    def maker(self, x: Any) -> Any:
        """The op that made a value."""
        return self.shared.makers.get(getattr(x, "name", ""))

    def pointwise(self, kind: str, *args: Held) -> Held:
        """A pointwise op: known now, a formula, or an op of the IR."""
        if all(isinstance(a, Known) for a in args):
            return self.folded(kind, *args)  # type: ignore[arg-type]
        if all(isinstance(a, Known | Formula) for a in args) and kind in SYMBOLIC:
            parts = [self.as_formula(a) for a in args]
            if all(p is not None for p in parts):
                dtype = DType.BOOL if kind in COMPARISONS else parts[-1].dtype  # type: ignore[union-attr]
                try:
                    return elementwise(dtype, SYMBOLIC[kind], *parts)  # type: ignore[arg-type]
                except FormulaError:
                    pass
        if kind == "truth":
            return self.op("cast", self.tensor(args[0]), dtype="bool")
        if kind == "floordiv":
            raise ImportRefused("a division of integers that depend on the tokens has no op")
        return self.op(kind, *self.operands(args, first=1 if kind == "where" else 0))

    def folded(self, kind: str, *args: Known, **attrs: Any) -> Known:
        """A pointwise op on arrays that are known."""
        arrays = [a.array for a in args]
        size = np.broadcast(*arrays).size
        if size > MAX_KNOWN:
            raise ImportRefused(f"a constant of {size} elements is computed from others")
        if any(a.dtype == object for a in arrays):
            return self._folded_sizes(kind, arrays)
        if kind == "truth":
            return Known(arrays[0] != 0)
        with np.errstate(all="ignore"):
            found = OPS[kind].reference(RefCall(kind, tuple(arrays), OPS[kind].complete(attrs), np.float32))[
                0
            ]
        return Known(np.asarray(found).astype(_kept(arrays, found)))

    def _folded_sizes(self, kind: str, arrays: Sequence[Any]) -> Known:
        if kind not in SYMBOLIC:
            raise ImportRefused(f"{kind} of a number that is computed from the sequence length has no op")
        one = np.vectorize(lambda *given: _simple(SYMBOLIC[kind], *given), otypes=[object])
        return Known(plain_array(one(*np.broadcast_arrays(*arrays))))

    def as_formula(self, x: Held) -> Formula | None:
        """A known array whose elements are all the same, as a formula; None for others and for floats."""
        if isinstance(x, Formula):
            return x
        if not isinstance(x, Known) or x.dtype.is_float or x.array.size == 0:
            return None
        flat = x.array.reshape(-1)
        if any(n != flat[0] for n in flat[1:]):
            return None
        first = x.number
        expr = sympy.sympify(first) if not isinstance(first, bool) else (sympy.true if first else sympy.false)
        return formula(DType.BOOL if isinstance(first, bool) else DType.I32, x.shape, expr)

    def operands(self, args: Sequence[Held], first: int = 0) -> list[Arg]:
        """Operands of one pointwise op: numbers are literals where that leaves the result's shape alone."""
        rank = max(self.rank(a) for a in args)
        others = [a for a in args[first:] if not isinstance(a, Known)]
        dtypes = [self.dtype(a) for a in (others or args[first:])]
        return [
            self._operand(a, dtypes[0], rank, bool(others)) if i >= first else self.tensor(a)
            for i, a in enumerate(args)
        ]

    def _operand(self, x: Held, dtype: DType, rank: int, others: bool) -> Arg:
        if isinstance(x, Known) and x.array.size == 1 and others and x.array.dtype != object:
            if len(x.shape) <= rank:
                return self.literal(x.number, dtype)
        return self.tensor(x, dtype if isinstance(x, Known) else None)

    def literal(self, value: Any, dtype: DType) -> Scalar:
        if dtype is DType.BOOL:
            return Scalar(bool(value))
        if dtype.is_float:
            return Scalar(float(np.float32(value)))
        if value != int(value) or abs(int(value)) >= INT32_LIMIT:
            raise ImportRefused(f"the literal {value} does not fit {dtype}")
        return Scalar(int(value))

    def tensor(self, x: Held, dtype: DType | None = None) -> Value | Weight:
        """A value as an operand of the IR."""
        if isinstance(x, Formula):
            x = self._spelled(x)
        if isinstance(x, Known):
            x = self._constant(x, dtype or x.dtype)
        return x if dtype is None or self.type(x).dtype is dtype else self.op("cast", x, dtype=str(dtype))

    def _spelled(self, x: Formula) -> Value:
        """A formula's ops, made once."""
        if x not in self.shared.spelled:
            self.shared.spelled[x] = Spelling(self.op, x.shape, x.dtype).value(x.expr)
        return self.shared.spelled[x]

    def _constant(self, x: Known, dtype: DType) -> Value | Weight:
        if x.array.dtype == object:
            return self._sizes(x, dtype)
        if x.array.size == 1 or (x.array.size and (x.array == x.array.reshape(-1)[0]).all()):
            value = self.literal(x.number, dtype).value
            return self.op("full", shape=x.shape, value=value, dtype=str(dtype))
        name = self.shared.build.unique("constant")
        self.shared.arrays[name] = x.array.astype(dtype.numpy)
        return Weight(name, Tensor(dtype, x.shape))

    def _sizes(self, x: Known, dtype: DType) -> Value:
        if x.array.size != 1:
            raise ImportRefused(f"the sizes {x.array.tolist()} are used as numbers")
        made = self.op("dim", size=x.number, dtype="i32")
        made = made if dtype is DType.I32 else self.op("cast", made, dtype=str(dtype))
        return self.reshape(made, x.shape)

    def reshape(self, x: Any, shape: Sequence[Dim]) -> Any:
        shape = tuple(normalize(n) for n in shape)
        return x if self.type(x).shape == shape else self.op("reshape", x, shape=shape)

    def bound(self, size: Any) -> int:
        """The largest value of a size at any length up to the context."""
        found = upper_bound(normalize(size), {"S": (1, self.shared.context)})
        assert found is not None
        return found

    def check_rows(self, index: Held, table: Any, rows: Any) -> None:
        """Indices that are positions must stay inside the table at every length up to the context."""
        limits = index.limits(self.shared.context) if isinstance(index, Formula) else None
        if limits is None or not isinstance(rows, int) or (limits[0] >= 0 and limits[1] < rows):
            return
        most = self.shared.context - (limits[1] - rows + 1)
        raise ImportRefused(
            f"positions reach {limits[1]} at a context of {self.shared.context}, but the table "
            f"@{getattr(table, 'name', '?')} has {rows} rows",
            todo=f"Compile with --max-context {most} or less",
        )

    def _name(self, kind: str) -> str:
        """`l3.q_proj` for the linear of model.layers.3.self_attn.q_proj, `l3.self_attn.mul` beside it."""
        parts = [p for p in re.split(r"[./]", self.loc) if p]
        layer = next((f"l{p}" for p in parts if p.isdigit()), "")
        tail = parts[-1] if parts and not parts[-1].isdigit() else ""
        own = "" if kind in _NAMED_BY_MODULE and tail else kind
        return ".".join(p for p in (layer, tail, own) if p)


_NAMED_BY_MODULE = frozenset({"linear", "layer_norm", "rms_norm", "embed", "attention"})


def _simple(fn: Callable[..., Any], *given: Any) -> Any:
    found = fn(*(sympy.sympify(g) for g in given))
    return _plain(sympy.expand(found) if isinstance(found, sympy.Expr) else found)


def _plain(value: Any) -> Any:
    """A Python number where an expression is one. Raises ImportRefused where it depends on the length."""
    if value in (sympy.true, sympy.false) or isinstance(value, bool):
        return bool(value)
    if isinstance(value, sympy.Basic):
        if not isinstance(value, sympy.Expr):
            raise ImportRefused(f"it branches on the sequence length: {value}")
        return int(value) if value.is_Integer else value
    return value


def plain_array(array: Any) -> Any:
    """An array of objects as one of numbers, where all of them are."""
    given = np.asarray(array, object)
    found = np.empty(given.shape, object)
    found.reshape(-1)[:] = [_plain(n) for n in given.reshape(-1)]
    kinds = {type(n) for n in found.reshape(-1)}
    if kinds == {bool}:
        return found.astype(bool)
    return found.astype(np.int64) if kinds and kinds <= {int} else found


def _kept(arrays: Sequence[Any], found: Any) -> Any:
    """The result's type: that of the operands, or of truth values."""
    return np.asarray(found).dtype if np.asarray(found).dtype == np.bool_ else arrays[-1].dtype
