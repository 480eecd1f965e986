"""What each kernel of a step must read, write and compute, however it does it: the terms of bounds.

One way of counting for all targets, which differ in the arrays that their kernels read. Bytes of weights are
those of the packed arrays; operations are the multiplications and additions of products (linears, attention,
matmuls) that count: keys that a mask hides are not among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
import sympy
from sympy.logic.boolalg import And

from ir.dims import Dim, Table, evaluate, product
from ir.graph import Arg, Op, Value, tensor_of
from ir.ops.attention import TAIL
from ir.predicates import conjuncts, evaluate_grid, window_of
from ir.types import KV, DType, Tensor
from passes.linears import EXPERTS, experts_of
from passes.match import attribute, operand, operand_named
from passes.memory.schedule import Kernel, Schedule

LOOKUPS = ("embed", "qembed", "take", "take_rows")  # they read as many rows of their table as they write
LINEARS = ("linear", "qlinear", *EXPERTS)


class Packed(Protocol):
    """An array of a target's file of weights."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class StepShape:
    """counts: new tokens of each request; lens: tokens in its cache after the step; num_rows: of logits."""

    counts: tuple[int, ...]
    lens: tuple[int, ...]
    num_rows: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"T": sum(self.counts), "R": len(self.counts), "Q": self.num_rows}


@dataclass(frozen=True)
class Cost:
    """dtype: of the products: "f32", "bf16", or of codes, "u4", "i8" or "f8e4m3".

    kv_bytes and activation_bytes are read and written.
    """

    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0
    operations: int = 0
    dtype: str = "f32"

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


@dataclass(frozen=True)
class CostedKernel:
    """label: what kernels that do the same share. weights: the packed arrays that it reads."""

    kernel: Kernel
    label: str
    weights: tuple[Packed, ...]

    @property
    def op(self) -> Op:
        return self.kernel.ops[0]


@dataclass(frozen=True)
class Costs:
    """The kernels of a lowered graph, in the order of a step, and what a step takes of each.

    given: values that no kernel computes, the step's own arrays and what is packed. narrow_queries: whether
    attention rounds queries to the cache's type, in which it then multiplies.
    """

    kernels: tuple[CostedKernel, ...]
    weight_order: tuple[str, ...]
    given: frozenset[str]
    narrow_queries: bool

    @staticmethod
    def of(
        schedule: Schedule,
        reads: Sequence[Sequence[Packed]],
        weight_order: Sequence[str],
        *,
        narrow_queries: bool = False,
    ) -> Costs:
        """reads: for each kernel of the schedule the arrays that it reads."""
        kernels = tuple(
            CostedKernel(kernel, label(kernel), tuple(weights))
            for kernel, weights in zip(schedule.kernels, reads, strict=True)
        )
        given = schedule.constants | {v.name for v in schedule.graph.inputs}
        return Costs(kernels, tuple(weight_order), given, narrow_queries)

    def step(self, shape: StepShape) -> list[Cost]:
        """The cost of each kernel."""
        return [self._cost(kernel, shape) for kernel in self.kernels]

    def _cost(self, kernel: CostedKernel, shape: StepShape) -> Cost:
        sizes, op, inside = shape.sizes, kernel.op, kernel.kernel.inside
        made = (o for each in kernel.kernel.ops for o in each.outs if o.name not in inside)
        written = sum(_bytes(o, sizes) for o in made)
        return Cost(
            weight_bytes=sum(_read_bytes(op, w, sizes) for w in kernel.weights),
            kv_bytes=_kv_bytes(op, shape),
            activation_bytes=written + sum(_bytes(v, sizes) for v in self._read(kernel.kernel)),
            operations=_operations(op, shape),
            dtype=_product_dtype(op, self.narrow_queries),
        )

    def _read(self, kernel: Kernel) -> list[Value]:
        """Values computed by other kernels; of a table that rows are looked up in, what comes out."""
        made = {o.name for op in kernel.ops for o in op.outs}
        read = {v.name: v for op in kernel.ops for v in op.values if v.name not in made | self.given}
        if kernel.ops[0].kind in LOOKUPS:
            return [kernel.ops[0].out]
        return list(read.values())


def label(kernel: Kernel) -> str:
    """What kernels that do the same share."""
    op = kernel.ops[0]
    if op.kind in LINEARS:
        rows, inputs = cast("tuple[int, int]", shape_of(op.args[1]))
        experts = attribute(op, "num_experts") if op.kind in EXPERTS else 1
        ending = " gated" * attribute(op, "gated") + f" of {experts}" * (op.kind in EXPERTS)
        return f"{op.kind} {inputs} -> {rows // experts}{ending}"
    if op.kind == "paged_attention":
        size = window_of(op.attr("mask"))
        return op.kind if size is None else f"{op.kind} window {size}"
    return "+".join(dict.fromkeys(o.kind for o in kernel.ops))


def shape_of(arg: Arg) -> tuple[Dim, ...]:
    return tensor_of(arg).shape


def _count(dims: tuple[Dim, ...], sizes: dict[str, int]) -> int:
    return evaluate(product(dims), sizes)


def _bytes(value: Value, sizes: dict[str, int]) -> int:
    """Of a tensor; a KV state is counted elsewhere."""
    if not isinstance(value.type, Tensor):
        return 0
    return _count(value.type.shape, sizes) * value.type.dtype.size_bytes


def _read_bytes(op: Op, weight: Packed, sizes: dict[str, int]) -> int:
    if op.kind in EXPERTS:
        return round(weight.bytes * _chosen(op, sizes))
    if op.kind not in LOOKUPS:
        return weight.bytes
    if op.kind != "qembed":
        return min(weight.bytes, _count(shape_of(op.out), sizes) * weight.dtype.size_bytes)
    rows = _count(shape_of(op.args[0]), sizes)
    return min(weight.bytes, weight.bytes * rows // cast(int, shape_of(op.args[1])[0]))


def _chosen(op: Op, sizes: dict[str, int]) -> float:
    """The part of all experts that any token chooses, on average where they choose them evenly."""
    *tokens, slots = shape_of(experts_of(op))
    each = min(1.0, cast(int, slots) / attribute(op, "num_experts"))
    return 1 - (1 - each) ** _count(tuple(tokens), sizes)


def _kv_bytes(op: Op, shape: StepShape) -> int:
    """Of one layer: what new tokens write, the blocks that they fill, or the keys and values they see."""
    if op.kind == "kv_write":
        return _layer_bytes(cast(KV, op.out.type), sum(shape.counts))
    if op.kind == "kv_seal":
        cache, tail = (cast(KV, cast(Value, a).type) for a in op.args[:2])
        steps = zip(shape.counts, shape.lens, strict=True)
        filled = sum(n // cache.block - (n - count) // cache.block for count, n in steps) * cache.block
        return _layer_bytes(cache, filled) + _layer_bytes(tail, filled)
    if op.kind == "paged_attention":
        kv = cast(KV, cast(Value, op.args[1]).type)
        seen = [keys for keys, _ in _seen(op, shape)]
        tail = operand(op, TAIL)
        if tail is None:
            return _layer_bytes(kv, sum(seen))
        cached, exact = _split_at_tail(shape, seen, kv.block)
        return _layer_bytes(kv, cached) + _layer_bytes(cast(KV, cast(Value, tail).type), exact)
    if op.kind == "paged_recurrence":
        kv = cast(KV, cast(Value, op.args[0]).type)
        replayed, states = _replayed(shape, kv.block)
        inputs = sum(s.bytes_per_block(kv.block) for s in kv.streams if not s.per_block) // kv.block
        state = sum(s.bytes_per_block(kv.block) for s in kv.streams if s.per_block)
        return inputs * (replayed + sum(shape.counts)) + state * states
    return 0


def _replayed(shape: StepShape, block: int) -> tuple[int, int]:
    """(cached tokens that a recurrence computes on from, states that are read or written)."""
    tokens = states = 0
    for count, length in zip(shape.counts, shape.lens, strict=True):
        before = length - count
        tokens += (before - 1) % block + 1 if before else 0
        states += bool(before) + -(-length // block) - -(-before // block)
    return tokens, states


def _split_at_tail(shape: StepShape, seen: list[int], block: int) -> tuple[int, int]:
    """(keys that lie in full blocks, keys that lie in the blocks of the step's own tokens) of those seen."""
    cached = exact = 0
    for count, n, keys in zip(shape.counts, shape.lens, seen, strict=True):
        cached += max(0, (n - 1) // block * block - (n - keys))
        exact += min(keys, n - (n - count) // block * block)
    return cached, exact


def _layer_bytes(kv: KV, tokens: int) -> int:
    """Of so many tokens' keys and values, scales included."""
    return -(-tokens * sum(stream.bytes_per_block(kv.block) for stream in kv.streams) // kv.block)


def _operations(op: Op, shape: StepShape) -> int:
    if op.kind in EXPERTS:
        pairs = _count(shape_of(op.out)[:-1], shape.sizes)
        return 2 * pairs * _count(shape_of(op.args[1]), shape.sizes) // attribute(op, "num_experts")
    if op.kind in LINEARS:
        rows = _count(shape_of(op.args[0])[:-1], shape.sizes)
        return 2 * rows * _count(shape_of(op.args[1]), shape.sizes)
    if op.kind == "matmul":
        inner = cast(int, shape_of(op.args[0])[-1])
        return 2 * _count(shape_of(op.out), shape.sizes) * inner
    if op.kind == "paged_attention":
        heads, key_size = cast("tuple[int, int]", shape_of(op.args[0])[1:])
        value_size = cast(int, shape_of(op.out)[-1])
        return 2 * heads * (key_size + value_size) * sum(pairs for _, pairs in _seen(op, shape))
    if op.kind == "paged_recurrence":
        new, has_beta = sum(shape.counts), operand_named(op, "beta") is not None
        keys, (heads, size) = (shape_of(op.args[i])[1:] for i in (2, 3))
        replayed, _ = _replayed(shape, cast(KV, cast(Value, op.args[0]).type).block)
        products = (2 if has_beta else 1) * (new + replayed) + new
        return 2 * cast(int, product((keys[1], heads, size))) * products
    return 0


def _product_dtype(op: Op, narrow_queries: bool) -> str:
    """The type that both factors have, so that the machine could multiply in it; f32 where they differ."""
    if op.kind in ("qlinear", "qmoe_linear"):
        return _code_product(op)
    if op.kind in LINEARS:
        both = {tensor_of(op.args[0]).dtype, tensor_of(op.args[1]).dtype}
    elif op.kind == "paged_attention":
        cached = cast(KV, cast(Value, op.args[1]).type).streams[0].dtype
        narrow = DType.BF16 if cached.is_code else cached  # what codes are widened to
        both = {narrow} if narrow_queries else {tensor_of(op.args[0]).dtype, cached}
    else:
        both = set[DType]()
    return "bf16" if both == {DType.BF16} else "f32"


def _code_product(op: Op) -> str:
    """The type of the weights' codes where x is of codes too, which a machine multiplies; else that of x."""
    codes, x_codes = tensor_of(op.args[1]).dtype, attribute(op, "x_dtype")
    if x_codes is None:
        return "bf16" if tensor_of(op.args[0]).dtype is DType.BF16 else "f32"
    if DType.F8E4M3 in (codes, x_codes):
        return "f8e4m3" if codes == x_codes else "f32"
    return "u4" if codes is DType.U4 else "i8"


def _seen(op: Op, shape: StepShape) -> list[tuple[int, int]]:
    return [_visible(op.attr("mask"), n, length) for n, length in zip(shape.counts, shape.lens, strict=True)]


@lru_cache(maxsize=4096)
def _visible(mask: Any, count: int, length: int) -> tuple[int, int]:
    """(keys that any of a request's last `count` tokens sees, pairs of one of them and a key that it sees).

    Of a mask with tables, whose entries are weights, the other terms count: at most so many.
    """
    terms = [t for t in conjuncts(sympy.sympify(mask)) if not t.has(Table)]  # a mask may be a plain bool
    queries, keys = np.arange(length - count, length)[:, None], np.arange(length)[None, :]
    grid = np.broadcast_to(evaluate_grid(And(*terms), queries, keys), (count, length))
    return int(grid.any(0).sum()), int(grid.sum())
