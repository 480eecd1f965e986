"""What a converter sees of the op that it converts, and the helpers that all converters share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from pathlib import PurePath
from typing import Any

import numpy as np
import sympy

from compiler.importers.refused import ImportRefused
from compiler.importers.sizes import to_dim
from ir.build import GraphBuilder
from ir.dims import Dim, upper_bound
from ir.graph import Arg, Scalar, Value, Weight
from ir.types import DType, Tensor

_DTYPES: dict[str, DType] = {
    "torch.float64": DType.F64,
    "torch.float32": DType.F32,
    "torch.float16": DType.F16,
    "torch.bfloat16": DType.BF16,
    "torch.int64": DType.I32,  # positions, token ids and sizes all fit; a literal that does not is refused
    "torch.int32": DType.I32,
    "torch.int16": DType.I32,
    "torch.int8": DType.I8,
    "torch.uint8": DType.U8,
    "torch.bool": DType.BOOL,
}

INT32_LIMIT = 2**31

_MOVES = frozenset({"reshape", "transpose", "expand", "slice", "take"})
_NAMED_BY_MODULE = frozenset({"linear", "layer_norm", "rms_norm", "embed", "attention", "recurrence"})


def torch_dtype(dtype: Any) -> DType:
    """The IR's element type for torch's. Raises ImportRefused on one that it does not have."""
    if str(dtype) not in _DTYPES:
        what, todo = f"element type {dtype} is not one of the IR's", f"Convert it to {', '.join(DType)}"
        raise ImportRefused(what, where="model", todo=todo)
    return _DTYPES[str(dtype)]


def part_dtype(dtype: Any) -> DType:
    """The element type of a value, or of a complex value's two parts."""
    return DType.F32 if str(dtype) == "torch.complex64" else torch_dtype(dtype)


def source_line(node: Any, short: bool = False) -> str:
    """`File NAME, line N, in FUNCTION` of the source, or `NAME:N` without folders; "" where unknown."""
    trace = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    frames = [t for t in trace if t.startswith("File ")]
    if not frames:
        return ""
    found = re.match(r'File "(.*)", line (\d+)', frames[-1])
    return f"{PurePath(found[1]).name}:{found[2]}" if short and found else frames[-1].replace('"', "")


class Context:
    """One call of the exported graph: emits ops at its `loc` and knows the type that torch gives it."""

    def __init__(
        self,
        build: GraphBuilder,
        node: Any,
        loc: str,
        context: int,
        limits: dict[str, tuple[int, int]],
        constant: set[str],
    ) -> None:
        self.build, self.node, self.loc, self.context = build, node, loc, context
        self.limits, self.constant = limits, constant
        self.place = loc or source_line(node, short=True)  # an op of the model itself has no module path

    @property
    def out(self) -> Tensor:
        """The result's type in torch; of several results, the first one's."""
        value = self.node.meta["val"]
        value = value[0] if isinstance(value, list | tuple) else value
        return Tensor(part_dtype(value.dtype), tuple(self.dim(n) for n in value.shape))

    def dim(self, size: Any) -> Dim:
        """torch's size as the IR's."""
        return to_dim(size, self.context)

    def op(self, kind: str, *args: Arg, several: bool = False, **attrs: Any) -> Any:
        """Append an op named after its module; bounds of integer values are followed."""
        made: Any = self.build.op(kind, *args, name=self._name(kind), loc=self.place, several=True, **attrs)
        if all(self.is_constant(a) for a in args if not isinstance(a, Scalar | None)) and args:
            self.constant.update(v.name for v in made)
        limit = self._limit(kind, args, attrs)
        if limit is not None:
            self.limits.update({v.name: limit for v in made})
        return made if several else made[0]

    def is_constant(self, arg: Any) -> bool:
        """Whether an operand is computed from weights alone."""
        return isinstance(arg, Weight | Scalar) or (isinstance(arg, Value) and arg.name in self.constant)

    def type(self, arg: Any) -> Tensor:
        if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor):
            return arg.type
        raise ImportRefused(f"{arg!r} is not a tensor")

    def tensor(self, arg: Any, dtype: DType | None = None) -> Value | Weight:
        """An operand as a tensor: literals and sizes become one."""
        if isinstance(arg, Value | Weight):
            return arg if dtype is None else self.cast(arg, dtype)
        if isinstance(arg, sympy.Basic):
            return self.cast(self.op("dim", size=arg, dtype="i32"), dtype or DType.I32)
        value = arg.value if isinstance(arg, Scalar) else arg
        kind = dtype or self.out.dtype
        return self.op("full", shape=(), value=self.literal(value, kind).value, dtype=str(kind))

    def operand(self, arg: Any, dtype: DType) -> Arg:
        """An operand of a pointwise op that computes in `dtype`: a tensor is cast, a literal stays one."""
        if isinstance(arg, bool | int | float):
            return self.literal(arg, dtype)
        if isinstance(arg, Scalar):
            return self.literal(arg.value, dtype)
        return self.tensor(arg, dtype)

    def operands(self, args: Sequence[Any], dtype: DType) -> list[Arg]:
        """Operands of one pointwise op, of which at least one is made a tensor."""
        found = [self.operand(a, dtype) for a in args]
        if all(isinstance(a, Scalar) for a in found):
            found[0] = self.tensor(found[0], dtype)
        return found

    def literal(self, value: bool | int | float, dtype: DType) -> Scalar:
        """A literal in the spelling that belongs to an element type."""
        if dtype is DType.BOOL:
            return Scalar(bool(value))
        if dtype.is_float:
            return Scalar(float(value))
        if value in (inf, -inf) or value != int(value) or abs(int(value)) >= INT32_LIMIT:
            raise ImportRefused(f"the literal {value} does not fit {dtype}")
        return Scalar(int(value))

    def cast(self, x: Value | Weight, dtype: DType) -> Value | Weight:
        return x if self.type(x).dtype is dtype else self.op("cast", x, dtype=str(dtype))

    def reshape(self, x: Any, shape: Sequence[Dim]) -> Value | Weight:
        x = self.tensor(x)
        return x if self.type(x).shape == tuple(shape) else self.op("reshape", x, shape=tuple(shape))

    def axis(self, x: Any, axis: int, extra: int = 0) -> int:
        """A non-negative axis of x (of an x with `extra` more axes)."""
        rank = self.type(x).rank + extra
        return axis + rank if axis < 0 else axis

    def symbolic_float(self, node: Any) -> Value | Weight:
        """A float that Python computed from sizes (a quotient) as scalar ops, so that a pass can see it."""
        name = getattr(node.target, "__name__", str(node.target))
        if name == "sym_float":
            return self.tensor(self._float_operand(node.args[0]), DType.F32)
        kind = _FLOAT_OPS.get(name)
        if kind is None:
            raise ImportRefused(
                f"a number is computed from the sequence length by {node.target}, which has no op"
            )
        args = [self._float_operand(a) for a in node.args]
        return self.op(kind, *args)

    def _float_operand(self, arg: Any) -> Arg:
        if isinstance(arg, bool | int | float):
            return Scalar(float(arg))
        value = arg.meta["val"]
        if type(value).__name__ == "SymInt":
            return self.tensor(self.dim(value), DType.F32)
        return self.symbolic_float(arg)

    def filled_with(self, value: Any) -> bool | int | float | None:
        """The number that every element is, where that is plain to see."""
        if isinstance(value, Scalar):
            return value.value
        op = next((op for op in reversed(self.build.ops) if value in op.outs), None)
        if op is None:
            return None
        if op.kind in ("cast", "reshape", "expand"):
            return self.filled_with(op.args[0])
        if op.kind in _FILLED:
            numbers = [self.filled_with(a) for a in op.args]
            kind = self.type(value).dtype.numpy.type
            return None if None in numbers else _FILLED[op.kind](*(kind(n) for n in numbers)).item()
        return op.attr("value") if op.kind == "full" else None

    def least(self, value: Any) -> int | None:
        """The least value of an integer tensor, as far as it is known. Token ids are never negative."""
        if getattr(value, "name", "") == "ids":
            return 0
        limit = self.limits.get(getattr(value, "name", ""))
        return None if limit is None else limit[0]

    def check_rows(self, ids: Any, table: Any, size: Any = None) -> None:
        """Indices that are positions must stay inside the table at every length up to the context.

        size: of the axis that they index, by default the first.
        """
        limit = self.limits.get(getattr(ids, "name", ""))
        rows = self.type(table).shape[0] if size is None else size
        if limit is None or not isinstance(rows, int) or (limit[0] >= 0 and limit[1] < rows):
            return
        most = self.context - (limit[1] - rows + 1)
        raise ImportRefused(
            f"positions reach {limit[1]} at a context of {self.context}, but the learned position table "
            f"@{getattr(table, 'name', '?')} has {rows} rows",
            todo=f"Compile with --max-context {most} or less",
        )

    def _name(self, kind: str) -> str:
        """`l3.q_proj` for the linear of model.layers.3.self_attn.q_proj, `l3.self_attn.mul` beside it."""
        parts = self.loc.split(".") if self.loc else []
        layer = next((f"l{p}" for p in parts if p.isdigit()), "")
        tail = parts[-1] if parts and not parts[-1].isdigit() else ""
        own = "" if kind in _NAMED_BY_MODULE and tail else kind
        return ".".join(p for p in (layer, tail, own) if p)

    def _limit(self, kind: str, args: Sequence[Arg], attrs: Any) -> tuple[int, int] | None:
        """The least and greatest value of an integer result that is made from positions."""
        if kind == "iota":
            size = upper_bound(attrs["size"], {"S": (1, self.context)})
            return None if size is None else (0, size - 1)
        spans = [self._span(a) for a in args[: 1 if kind in _MOVES else None]]
        if any(s is None for s in spans) or not spans:
            return None
        if kind in _MOVES or (kind == "cast" and DType(attrs["dtype"]).is_integer):
            return spans[0]
        if kind not in ("add", "sub", "mul") or len(spans) != 2:
            return None
        (a, b), (c, d) = spans[0] or (0, 0), spans[1] or (0, 0)
        corners = {"add": (a + c, b + d), "sub": (a - d, b - c), "mul": (a * c, a * d, b * c, b * d)}[kind]
        return min(corners), max(corners)

    def _span(self, arg: Arg) -> tuple[int, int] | None:
        if isinstance(arg, Scalar):
            return (arg.value, arg.value) if isinstance(arg.value, int) else None
        return self.limits.get(arg.name) if isinstance(arg, Value) else None


_FILLED = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative}

_FLOAT_OPS = {
    "truediv": "div",
    "mul": "mul",
    "add": "add",
    "sub": "sub",
    "pow": "pow",
    "_sym_sqrt": "sqrt",
    "sym_sqrt": "sqrt",
    "_sym_log": "log",
    "sym_log": "log",
    "log": "log",
    "sqrt": "sqrt",
}
