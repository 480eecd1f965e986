"""The reference interpreter: runs a graph with each op's numpy reference, slowly and obviously.

With `float_type=np.float64` everything that the graph calls f32 is computed in double precision; casts to narrower
types still round, so the result is what exact arithmetic between those casts would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from ir.dims import evaluate
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.ops import OPS, RefCall
from ir.text.printer import print_op
from ir.types import KV, DType, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
KVState = dict[str, Array]  # stream name -> [layers, blocks, block, heads, head_size]
WeightReader = Callable[[str], Array]


class InterpretError(ValueError):
    """An input does not fit the graph, or an op's reference failed; the message shows the op."""


@dataclass(frozen=True)
class Run:
    """What a run gave: outputs in order, every value by name, and the sizes that were bound."""

    outputs: tuple[Any, ...]
    values: Mapping[str, Any]
    dims: Mapping[str, int]


def interpret(
    graph: Graph,
    inputs: Mapping[str, Any],
    weights: WeightReader | Mapping[str, Array],
    float_type: type[np.floating[Any]] = np.float32,
) -> Run:
    """Run a graph. Raises InterpretError.

    inputs: an array per tensor input (its shape binds the symbols), a KVState per kv input.
    weights: finds a weight's array by name; a missing one raises KeyError.
    """
    read = weights if callable(weights) else weights.__getitem__
    dims = bind_dims(graph, inputs)
    values: dict[str, Any] = {v.name: _as_input(inputs[v.name], v, float_type) for v in graph.inputs}
    for op in graph.ops:
        values.update(
            zip((o.name for o in op.outs), _run_op(op, values, read, dims, float_type), strict=True)
        )
    return Run(tuple(values[v.name] for v in graph.outputs), values, dims)


def bind_dims(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, int]:
    """The value of each symbol, from the shapes of the inputs. Raises InterpretError where they disagree."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        if value.name not in inputs:
            raise InterpretError(f"graph @{graph.name} needs input %{value.name}")
        if isinstance(value.type, Tensor):
            _bind_shape(value, np.shape(inputs[value.name]), found)
    for name, (low, high) in graph.dims.items():
        size = found.get(name)
        if size is not None and not (low <= size and (high is None or size <= high)):
            raise InterpretError(f"{name}={size} is outside {low}..{'' if high is None else high}")
    return found


def _bind_shape(value: Value, shape: tuple[int, ...], found: dict[str, int]) -> None:
    assert isinstance(value.type, Tensor)
    if len(shape) != value.type.rank:
        raise InterpretError(f"input %{value.name} has shape {list(shape)}, not {list(value.type.shape)}")
    for dim, size in zip(value.type.shape, shape, strict=True):
        expected: Any = dim
        if isinstance(dim, sympy.Expr) and len(dim.free_symbols) == 1:
            (name,) = dim.free_symbols
            solved = sympy.Integer(size) - (dim - name)  # sizes of inputs are a symbol plus a constant
            expected = found.setdefault(str(name), int(solved)) + int(dim - name)
        if expected != size:
            raise InterpretError(f"input %{value.name} has shape {list(shape)}, not {list(value.type.shape)}")


def _as_input(given: Any, value: Value, float_type: type[np.floating[Any]]) -> Any:
    if isinstance(value.type, KV):
        return given
    dtype = value.type.dtype
    return np.asarray(given, dtype=float_type if dtype is DType.F32 else dtype.numpy)


def _run_op(
    op: Op,
    values: Mapping[str, Any],
    read: WeightReader,
    dims: Mapping[str, int],
    float_type: type[np.floating[Any]],
) -> list[Any]:
    args = tuple(_argument(a, values, read, float_type) for a in op.args)
    attrs = {name: _concrete(a, dims) for name, a in OPS[op.kind].complete(op.attrs).items()}
    try:
        return list(OPS[op.kind].reference(RefCall(op.kind, args, attrs, float_type)))
    except (ValueError, IndexError, TypeError) as e:
        raise InterpretError(f"{e} in\n  {print_op(op)}") from e


def _argument(
    arg: Arg, values: Mapping[str, Any], read: WeightReader, float_type: type[np.floating[Any]]
) -> Any:
    if isinstance(arg, Value):
        return values[arg.name]
    if isinstance(arg, Weight):
        array = read(arg.name)
        wide = isinstance(arg.type, Tensor) and arg.type.dtype is DType.F32 and float_type is not np.float32
        return array.astype(float_type) if wide else array
    return arg.value if isinstance(arg, Scalar) else None


def _concrete(attr: Any, dims: Mapping[str, int]) -> Any:
    """Sizes evaluated; predicates over positions are left alone."""
    if isinstance(attr, tuple):
        return tuple(_concrete(a, dims) for a in attr)  # type: ignore[misc]
    return evaluate(attr, dims) if isinstance(attr, sympy.Expr) else attr


def empty_kv(kv: KV, num_blocks: int) -> KVState:
    """A KV state whose every slot is poisoned with NaN."""
    return {
        s.name: np.full((kv.layers, num_blocks, kv.block, s.heads, s.head_size), np.nan, s.dtype.numpy)
        for s in kv.streams
    }
