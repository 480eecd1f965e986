"""The reference interpreter: runs a graph with each op's numpy reference, slowly and obviously.

Values of the types f16 and bf16 are widened before an op and rounded after it, once. With
`float_type=np.float64` everything that the graph calls f32 is computed, and kept, in double precision;
narrower results still round, so the outcome is what exact arithmetic between those roundings would give.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from ir.dims import evaluate
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.ops import OPS, RefCall
from ir.ops.base import is_size
from ir.reuse import Key, Reuse, exact, key_of
from ir.text.printer import print_op
from ir.types import KV, DType, Tensor, Type

Array = np.ndarray[Any, np.dtype[Any]]
KVState = dict[str, Array]  # a stream's parts: [layers, blocks, *Stream.part_shape]
WeightReader = Callable[[str], Array]
Compute = Callable[[Op, RefCall], Sequence[Any]]  # an op's results


class InterpretError(ValueError):
    """An input does not fit the graph, or an op's reference failed; the message shows the op."""


@dataclass(frozen=True)
class Run:
    """What a run gave: outputs in order, every value by name, and the sizes that were bound.

    keys: what each value is known by, where results were reused.
    """

    outputs: tuple[Any, ...]
    values: Mapping[str, Any]
    dims: Mapping[str, int]
    keys: Mapping[str, Key]


def interpret(
    graph: Graph,
    inputs: Mapping[str, Any],
    weights: WeightReader | Mapping[str, Array],
    float_type: type[np.floating[Any]] = np.float32,
    reuse: Reuse | None = None,
) -> Run:
    """Run a graph. Raises InterpretError.

    inputs: an array per tensor input (its shape binds the symbols), a KVState per kv input.
    weights: finds a weight's array by name; a missing one raises KeyError.
    reuse: the results of earlier runs, which are taken where an op's computation is one of theirs.
    """
    read = weights if callable(weights) else weights.__getitem__
    machine = Machine(graph, bind_dims(graph, inputs), read, float_type, reuse)
    for value in graph.inputs:
        machine.give(value, inputs[value.name])
    with np.errstate(all="ignore"):
        for op in graph.ops:
            machine.run(op)
    outputs = tuple(machine.values[v.name] for v in graph.outputs)
    return Run(outputs, machine.values, machine.dims, machine.keys)


def bind_dims(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, int]:
    """The value of each symbol, from the shapes of the inputs. Raises InterpretError where they disagree."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        if value.name not in inputs:
            raise InterpretError(f"graph @{graph.name} needs input %{value.name}")
        if isinstance(value.type, Tensor):
            _bind_shape(value.name, value.type, np.shape(inputs[value.name]), found)
    for value in graph.inputs:
        _check_input(value, inputs[value.name], found)
    for name, (low, high) in graph.dims.items():
        size = found.get(name)
        if size is not None and not (low <= size and (high is None or size <= high)):
            raise InterpretError(f"{name}={size} is outside {low}..{'' if high is None else high}")
    return found


def _bind_shape(name: str, type: Tensor, shape: tuple[int, ...], found: dict[str, int]) -> None:
    """Bind the symbols of sizes that are one symbol, scaled and shifted: 2 * T + 1."""
    if len(shape) != type.rank:
        raise InterpretError(f"input %{name} has shape {list(shape)}, not {list(type.shape)}")
    for dim, size in zip(type.shape, shape, strict=True):
        if isinstance(dim, int) or len(dim.free_symbols) != 1:
            continue
        (unknown,) = dim.free_symbols
        scale = dim.coeff(unknown)
        shift = dim - scale * unknown
        if scale.is_Integer and shift.is_Integer and (size - shift) % scale == 0:
            found.setdefault(unknown.name, int((size - shift) // scale))


def _check_input(value: Value, given: Any, dims: Mapping[str, int]) -> None:
    """The input has the shape that its type gives under the binding."""
    if isinstance(value.type, KV):
        _check_state(value.name, value.type, given)
        return
    try:
        expected = [evaluate(d, dims) for d in value.type.shape]
    except KeyError as e:
        raise InterpretError(f"input %{value.name}: no input's shape tells the size {e.args[0]}") from None
    if expected != list(np.shape(given)):
        shown = f"{list(value.type.shape)} with {dict(dims)}"
        raise InterpretError(f"input %{value.name} has shape {list(np.shape(given))}, not {shown}")


def _check_state(name: str, kv: KV, given: Any) -> None:
    shapes = {p: (kv.layers, *s.part_shape(p, kv.block)) for s in kv.streams for p in s.parts}
    found = {part: (a.shape[0], *a.shape[2:]) for part, a in given.items()} if hasattr(given, "items") else {}
    if shapes != found:
        raise InterpretError(
            f"input %{name} is no state of {kv}: an array [layers, blocks, *the part's shape] each"
        )


@contextmanager
def _shown(op: Op) -> Generator[None]:
    """Failures name the op."""
    try:
        yield
    except (ValueError, IndexError, TypeError, ArithmeticError) as e:
        raise InterpretError(f"{e} in\n  {print_op(op)}") from e


def reference(op: Op, call: RefCall) -> Sequence[Any]:
    """An op's results by its numpy reference."""
    return OPS[op.kind].reference(call)


class Machine:
    """The values computed so far, and how one op is run."""

    def __init__(
        self,
        graph: Graph,
        dims: dict[str, int],
        read: WeightReader,
        float_type: type[np.floating[Any]],
        reuse: Reuse | None,
        compute: Compute | None = None,
    ) -> None:
        self.values: dict[str, Any] = {}
        self.keys: dict[str, Key] = {}
        self.dims = dims
        self._graph, self._read, self._float, self._reuse = graph, read, float_type, reuse
        self._compute = compute or reference
        self._sizes: dict[Any, int] = {}

    def give(self, value: Value, given: Any) -> None:
        """Set an input of the graph."""
        self.values[value.name] = self._widened(given, value.type)
        if self._reuse is not None:
            self.keys[value.name] = key_of(self.values[value.name])

    def run(self, op: Op) -> None:
        with _shown(op):
            attrs = {name: self._concrete(a) for name, a in OPS[op.kind].complete(op.attrs).items()}
        if self._reuse is None:
            for out, value in zip(op.outs, self._results(op, attrs), strict=True):
                self.values[out.name] = value
            return
        known = self._reuse.results(self._call(op, attrs), partial(self._results, op, attrs))
        for out, (value, key) in zip(op.outs, known, strict=True):
            self.values[out.name], self.keys[out.name] = value, key

    def _results(self, op: Op, attrs: Mapping[str, Any]) -> list[Any]:
        args = tuple(self._argument(a) for a in op.args)
        with _shown(op):
            types = tuple(a.type if isinstance(a, Value | Weight) else a for a in op.args)
            results = self._compute(op, RefCall(op.kind, args, attrs, self._float, types))
            return [self._checked(result, out.type) for out, result in zip(op.outs, results, strict=True)]

    def _call(self, op: Op, attrs: Mapping[str, Any]) -> Key:
        """All that the op's results depend on."""
        args = tuple(self.keys[a.name] if isinstance(a, Value) else a for a in op.args)
        given = tuple((name, exact(attr)) for name, attr in sorted(attrs.items()))
        with _shown(op):
            outs = tuple(
                (o.type.dtype, self._shape(o.type)) if isinstance(o.type, Tensor) else o.type for o in op.outs
            )
        return op.kind, given, args, outs, self._float

    def _widened(self, given: Any, type: Type) -> Any:
        """A value in the type that it is kept in: f32 may be kept wide."""
        if isinstance(type, Tensor):
            return np.asarray(given, dtype=self._kept(type.dtype))
        parts = {part: s.part_dtype(part) for s in type.streams for part in s.parts}
        return {part: np.asarray(given[part], dtype=self._kept(dtype)) for part, dtype in parts.items()}

    def _kept(self, dtype: DType) -> Any:
        return self._float if dtype is DType.F32 else dtype.numpy

    def _checked(self, result: Any, type: Type) -> Any:
        """A result rounded to its type. Raises ValueError if its shape is not the one inferred."""
        if isinstance(type, KV):
            return result
        array = np.asarray(result, dtype=self._kept(type.dtype))
        expected = self._shape(type)
        if array.shape != expected:
            raise ValueError(f"the result has shape {list(array.shape)}, not {list(expected)}")
        return array

    def _argument(self, arg: Arg) -> Any:
        """An operand's array, f16 and bf16 widened."""
        if isinstance(arg, Scalar):
            return arg.value
        if arg is None or isinstance(arg.type, KV):
            return None if arg is None else self.values[arg.name]
        array = self.values[arg.name] if isinstance(arg, Value) else self._read(arg.name)
        narrow = arg.type.dtype in (DType.F16, DType.BF16)
        return np.asarray(array, dtype=self._float if narrow else self._kept(arg.type.dtype))

    def _concrete(self, attr: Any) -> Any:
        """Sizes evaluated; predicates over positions are left alone."""
        if isinstance(attr, tuple):
            return tuple(self._concrete(a) for a in cast("tuple[Any, ...]", attr))
        return self._size(attr) if is_size(attr) and not isinstance(attr, int) else attr

    def _shape(self, type: Tensor) -> tuple[int, ...]:
        return tuple(self._size(d) for d in type.shape)

    def _size(self, dim: Any) -> int:
        if isinstance(dim, int):
            return dim
        if dim not in self._sizes:
            try:
                self._sizes[dim] = evaluate(dim, self.dims)
            except KeyError as e:
                raise ValueError(f"no input's shape tells the size {e.args[0]}") from None
        return self._sizes[dim]


def empty_kv(kv: KV, num_blocks: int) -> KVState:
    """A KV state whose every slot is poisoned: with NaN, and with the largest codes of integers."""
    return {
        part: _poisoned((kv.layers, num_blocks, *s.part_shape(part, kv.block)), s.part_dtype(part))
        for s in kv.streams
        for part in s.parts
    }


def _poisoned(shape: tuple[int, ...], dtype: DType) -> Array:
    return np.full(shape, (1 << dtype.bits - 1) - 1 if dtype.is_integer else np.nan, dtype.numpy)
