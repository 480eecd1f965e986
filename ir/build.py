"""Building graphs op by op, with types inferred and names kept unique."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast, overload

from ir.dims import Bounds
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.ops import OPS, InferError
from ir.types import KV, Tensor, Type


class GraphBuilder:
    """Collects ops; `graph()` gives the immutable result.

    Attribute values that are None are left out. Raises InferError with the op's kind and loc on operands that
    do not fit.
    """

    def __init__(self, name: str, dims: Mapping[str, Bounds], inputs: Iterable[Value] = ()) -> None:
        self.name, self.dims = name, dict(dims)
        self.inputs: list[Value] = list(inputs)
        self.ops: list[Op] = []
        self._names = {v.name for v in self.inputs}
        self._next = 0

    def input(self, name: str, type: Type) -> Value:
        value = Value(self.unique(name), type)
        self.inputs.append(value)
        return value

    def unique(self, hint: str = "") -> str:
        """A name not used yet: the hint itself if it is free."""
        base = re.sub(r"[^A-Za-z0-9_.]", "_", hint)
        name = base
        while not name or name in self._names:
            self._next += 1
            name = f"{base}_{self._next}" if base else f"v{self._next}"
        self._names.add(name)
        return name

    def reserve(self, names: Iterable[str]) -> None:
        """Keep `unique` from handing out these names: those of the graph that is built anew, say."""
        self._names.update(names)

    @overload
    def op(
        self, kind: str, *args: Arg, name: str = "", loc: str = "", several: Literal[True], **attrs: Any
    ) -> tuple[Value, ...]: ...
    @overload
    def op(
        self,
        kind: str,
        *args: Arg,
        name: str = "",
        loc: str = "",
        several: Literal[False] = False,
        **attrs: Any,
    ) -> Value: ...
    def op(
        self, kind: str, *args: Arg, name: str = "", loc: str = "", several: bool = False, **attrs: Any
    ) -> Any:
        """Append an op and return its result (all of them as a tuple with several=True)."""
        given = {k: v for k, v in attrs.items() if v is not None}
        outs = tuple(Value(self.unique(name), t) for t in infer(kind, args, given, loc))
        self.ops.append(Op(kind, trim(args), given, outs, loc))
        return outs if several else outs[0]

    def append(self, op: Op) -> Op:
        """Append a finished op; its result names must be free."""
        for out in op.outs:
            if out.name in self._names:
                raise InferError(f"%{out.name} is defined twice")
            self._names.add(out.name)
        self.ops.append(op)
        return op

    def graph(self, outputs: Iterable[Value]) -> Graph:
        return Graph(self.name, self.dims, tuple(self.inputs), tuple(self.ops), tuple(outputs))


def trim(args: Iterable[Arg]) -> tuple[Arg, ...]:
    """Operands without absent ones at the end."""
    found = list(args)
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def infer(kind: str, args: Iterable[Arg], attrs: Mapping[str, Any], loc: str = "") -> tuple[Type, ...]:
    """Result types of an op. Raises InferError."""
    if kind not in OPS:
        raise InferError(f"there is no op {kind!r}{f' (at {loc})' if loc else ''}")
    types = tuple(a.type if isinstance(a, Value | Weight) else a for a in args)
    strange = [a for a in cast("tuple[Any, ...]", types) if not isinstance(a, Tensor | KV | Scalar | None)]
    if strange:
        raise InferError(f"{kind}: {strange[0]!r} is not an operand{f' (at {loc})' if loc else ''}")
    try:
        return OPS[kind].infer_types(types, attrs)
    except InferError as e:
        raise InferError(f"{e} (at {loc})" if loc else str(e)) from None
