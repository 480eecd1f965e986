"""Quantise the KV cache: its streams become codes with scales, and what is written is rounded to them.

Where each token and head has a scale (int8, fp8), `quantize` and `dequantize` come before `kv_write`, and
`fuse_dequant` folds them into it. Keys of int4 and int2 share scales by channel over the tokens of a block,
as in KIVI (arXiv 2402.02750), so that a block is quantised when it is full. Until then its tokens are in a
*tail*, a group of its own: they are written there, `kv_seal` quantises the blocks that a step fills, and a
query reads its own block from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ir.build import GraphBuilder, infer, trim
from ir.dims import symbol
from ir.graph import Arg, Graph, Op, Value, Weight
from ir.ops.attention import FIRST_TABLE, TAIL
from ir.rewrite import Miss
from ir.types import KV, TOKEN, DType, Stream, Tensor
from passes.base import Pass, PassError, Result
from passes.match import attribute, operand, shape
from passes.paging.formats import FORMATS, Format, KeyGrid, tail_of
from passes.paging.layout import R, T

NONE = "none"
TAILS = ("f32", "bf16")
_ERROR = {NONE: 0.0, "int8": 0.1, "fp8": 0.3, "int4": 0.5}  # of a value, as a share of its RMS; else any


@dataclass(frozen=True)
class QuantizeKv(Pass):
    """format: one of passes.paging.formats, or "none". groups: formats of single groups, the first ones, in
    place of it; a recurrence's state has none. tail: element type of tails, f32 or bf16. keys: what
    calibration found, by the place (loc) of the attention that writes them; keys by channel do without."""

    format: str = NONE
    tail: str = "bf16"
    groups: tuple[str, ...] = ()
    keys: Mapping[str, KeyGrid] = field(default_factory=dict[str, KeyGrid])

    def __post_init__(self) -> None:
        strange = [f for f in (self.format, *self.groups) if f != NONE and f not in FORMATS]
        if strange:
            there = ", ".join(FORMATS)
            raise ValueError(f"quantize_kv: there is no format {strange[0]!r}; there are {there}")
        if self.tail not in TAILS:
            raise ValueError(f"quantize_kv: tail must be {' or '.join(TAILS)}, not {self.tail!r}")

    @property
    def tolerance(self) -> float:
        return max(_ERROR.get(format, 4.0) for format in (self.format, *self.groups))

    def run(self, graph: Graph) -> Result:
        states = [v.name for v in graph.inputs if isinstance(v.type, KV) and not v.type.state]
        named = dict(zip(states, [*self.groups, *[self.format] * len(states)], strict=False))
        formats = {state: FORMATS[format] for state, format in named.items() if format != NONE}
        if not formats:
            return Result(graph, 0)
        grids, misses = _choose_grids(graph, self.keys)
        quantizer = _Quantizer(graph, formats, DType(self.tail), grids)
        for op in graph.ops:
            quantizer.add(op)
        return Result(quantizer.graph(), len(formats), tuple(misses))


@dataclass(frozen=True)
class _Tail:
    """A group's tail: its state now, and where its blocks are."""

    state: Value
    slots: Value
    table: Value


class _Quantizer:
    """Builds the graph anew, op by op. states: the old graph's versions of states -> what stands for them."""

    def __init__(
        self, graph: Graph, formats: Mapping[str, Format], tail: DType, grids: Mapping[str, KeyGrid]
    ) -> None:
        self.before, self.grids = graph, grids
        self.builder = GraphBuilder(graph.name, graph.dims)
        self.builder.reserve([*graph.producers(), *(v.name for v in graph.inputs)])
        self.inputs = {v.name: v for v in graph.inputs}
        self.states: dict[str, Value] = {}
        self._group: dict[str, str] = {}  # version of a state -> its group's number
        self._tails: dict[str, _Tail] = {}  # by group
        for value in graph.inputs:
            self.builder.inputs.append(self._input(value, formats.get(value.name)))
        for value in list(self.states.values()):
            if cast(KV, value.type).needs_tail:
                self._add_tail(value, tail)

    def add(self, op: Op) -> None:
        if op.kind == "kv_write":
            self._write(op)
        elif op.kind == "paged_attention":
            self._attend(op)
        else:
            self.builder.ops.append(op)

    def graph(self) -> Graph:
        outputs = [self.states.get(v.name, v) for v in self.before.outputs]
        tails = [tail.state for tail in self._tails.values()]
        return replace(self.builder.graph([*outputs, *tails]), arena=self.before.arena)

    def _input(self, value: Value, format: Format | None) -> Value:
        if not isinstance(value.type, KV):
            return value
        if format is not None and value.type.block % format.block_strip:
            reason = f"blocks of {value.type.block} tokens, for codes of {format.dtype}"
            todo = f"Use a multiple of {format.block_strip} tokens, --block 64 for example."
            raise PassError("quantize_kv", None, reason, todo)
        self._group[value.name] = value.name.removeprefix("kv")
        kv = value.type if format is None else format.quantized(value.type)
        self.states[value.name] = Value(value.name, kv)
        return self.states[value.name]

    def _add_tail(self, state: Value, dtype: DType) -> None:
        number, group = len(self.states) + len(self._tails), self._group[state.name]
        width = f"M{number}"
        self.builder.dims[width] = self.before.dims[f"M{group}"]
        self._tails[group] = _Tail(
            self.builder.input(f"kv{number}", tail_of(cast(KV, state.type), dtype)),
            self.builder.input(f"slots{number}", Tensor(DType.I32, (T,))),
            self.builder.input(f"table{number}", Tensor(DType.I32, (R, symbol(width)))),
        )

    def _write(self, op: Op) -> None:
        old, *fresh = op.args[:-1]
        state, group = self.states[cast(Value, old).name], self._group[cast(Value, old).name]
        if group in self._tails:
            written = self._finish(op, "kv_seal", state, *self._write_tail(op, fresh, group))
        else:
            streams = zip(cast(KV, state.type).streams, fresh, strict=True)
            rounded = [self._rounded(op, stream, x) for stream, x in streams]
            written = self._finish(op, "kv_write", state, *rounded, op.args[-1])
        self.states[op.out.name], self._group[op.out.name] = written, group

    def _write_tail(self, op: Op, fresh: list[Arg], group: str) -> list[Arg]:
        """Write to a group's tail. What kv_seal reads beside the group's state."""
        tail, layer = self._tails[group], op.attr("layer")
        name = f"{tail.slots.name.replace('slots', 'kv')}.{layer}"
        state = self._emit(op, "kv_write", tail.state, *fresh, tail.slots, name=name, layer=layer)
        self._tails[group] = replace(tail, state=state)
        return [state, self.inputs[f"table{group}"], tail.table, self.inputs["lens"], self.inputs["starts"]]

    def _rounded(self, op: Op, stream: Stream, x: Arg) -> Arg:
        """Elements as the stream's codes stand for them; codes with a minimum are made by the write alone."""
        grid = self._grid(op.out.name, stream)
        if grid is not None:
            x = x if grid.shift is None else self._emit(op, "sub", x, grid.shift)
            x = self._emit(op, "mul", x, grid.inverse)
        if stream.has_minimum or not stream.is_quantized:
            return x
        attrs: dict[str, Any] = {"dtype": str(stream.dtype), "group_size": 0, "scale": str(DType.F16)}
        codes = self.builder.op("quantize", x, loc=op.loc, several=True, **attrs)
        return self._emit(op, "dequantize", *codes, group_size=0)

    def _attend(self, op: Op) -> None:
        old = cast(Value, op.args[1]).name
        args = [*op.args, *[None] * (FIRST_TABLE - len(op.args))]
        args[1] = self.states[old]
        grid = self._grid(old, cast(KV, self.states[old].type).streams[0])
        if grid is not None:
            args[0] = self._emit(op, "mul", args[0], self._per_query_head(op, grid.scale))
        if self._group[old] in self._tails:
            tail = self._tails[self._group[old]]
            args[TAIL : TAIL + 2] = tail.state, tail.table
        self.builder.ops.append(replace(op, args=trim(args)))

    def _grid(self, written: str, stream: Stream) -> KeyGrid | None:
        """Of the stream in a state that the old graph wrote. Codes by channel need none."""
        takes_one = stream.name == "k" and stream.is_quantized and stream.per == TOKEN
        return self.grids.get(written) if takes_one else None

    def _per_query_head(self, op: Op, scale: Weight) -> Arg:
        """What each key head has, [G,D], for the query heads that read it, [H,D]."""
        (heads, size), queries = cast("tuple[int, int]", shape(scale)), cast(int, shape(op.args[0])[1])
        if queries == heads:
            return scale
        one = self._emit(op, "reshape", scale, shape=(heads, 1, size))
        many = self._emit(op, "concat", *[one] * (queries // heads), axis=1)
        return self._emit(op, "reshape", many, shape=(queries, size))

    def _emit(self, op: Op, kind: str, *args: Arg, name: str = "", **attrs: Any) -> Value:
        """A new op, at the place of one that was there."""
        return self.builder.op(kind, *args, name=name, loc=op.loc, several=False, **attrs)

    def _finish(self, op: Op, kind: str, *args: Arg) -> Value:
        """The op that gives what another one gave, under its name."""
        out = Value(op.out.name, infer(kind, args, op.attrs, op.loc)[0])
        self.builder.ops.append(Op(kind, trim(args), op.attrs, (out,), op.loc))
        return out


def _choose_grids(graph: Graph, keys: Mapping[str, KeyGrid]) -> tuple[dict[str, KeyGrid], list[Miss]]:
    """Grids by the version of the state that holds the keys. A shift is left out where a softmax would not
    cancel it, which the misses say."""
    found = {op.out.name: keys[op.loc] for op in graph.ops if op.kind == "kv_write" and op.loc in keys}
    misses: list[Miss] = []
    for op in (op for op in graph.ops if op.kind == "paged_attention"):
        state = cast(Value, op.args[1]).name
        grid = found.get(state)
        if grid is not None and grid.shift is not None and _sees_shift(op):
            misses.append(Miss("key shift", op, "a softcap or sinks would see the shift"))
            found[state] = replace(grid, shift=None)
    return found, misses


def _sees_shift(op: Op) -> bool:
    """Whether its result depends on a number that is added to all scores of a query."""
    return bool(attribute(op, "softcap")) or operand(op, 5) is not None
