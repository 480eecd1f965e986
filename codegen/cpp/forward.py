"""Prints forward.cpp: one readable `forward()` that every thread runs, with each kernel's op as a comment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from codegen.cpp.context import STEP_INPUTS, CodegenError, Context, refuse, shape_of
from codegen.cpp.kernels import KERNELS
from codegen.cpp.pointwise import Group, Operand, print_group
from codegen.cpp.spelling import comment, key, size, stored_ctype
from codegen.errors import describe
from codegen.kv_block import block_bytes
from codegen.loops import operand_strides
from ir.graph import Graph, Value, Weight, tensor_of
from ir.types import KV, Tensor
from passes.group_pointwise import groupable
from passes.memory.schedule import Kernel
from passes.memory.sizes import PARTIALS, scratch_bytes

HEADERS = (
    "attention.h", "choose.h", "epilogue.h", "kv_write.h", "moe.h", "pointwise.h", "quantize.h",
    "recurrence.h", "rows.h",
)  # fmt: skip
# Kernels whose threads draw their work from a counter.
SHARING = ("linear", "qlinear", "moe_linear", "qmoe_linear", "paged_attention", "paged_recurrence")


@dataclass
class Order:
    """Decides where threads have to meet.

    Before a kernel that touches what an earlier one wrote, or writes what it read; and after two kernels with
    work counters, which are reused in turn.
    """

    written: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])
    counters: int = 0

    def needs_barrier(self, reads: set[str], writes: set[str], sharing: bool) -> bool:
        meets = bool(
            reads & self.written or writes & (self.written | self.read) or (sharing and self.counters == 2)
        )
        if meets:
            self.written, self.read, self.counters = set(), set(), 0
        self.written |= writes
        self.read |= reads
        self.counters += sharing
        return meets


def print_forward(ctx: Context) -> str:
    """The whole source file. Raises CodegenError where an op has no kernel."""
    graph = ctx.graph
    if not isinstance(graph.outputs[0].type, Tensor):
        raise CodegenError(f"graph @{graph.name}: the first output must be the logits")
    body = _body(ctx)
    parts = [
        comment(f"The compiled forward pass of @{graph.name}; generated, do not edit."),
        "".join(f'#include "{h}"\n' for h in HEADERS) + '#include "abi.h"',
        "namespace octavo {",
        _constants(ctx),
        *(text.replace("NAME", name, 1) for text, name in ctx.structs.items()),
        *(f"KERNEL {text.replace('NAME', name, 1)}" for text, name in ctx.functions.items()),
        "void forward(Thread& th, const octavo_step& s, const void* const* weights) {\n" + body + "}",
        "}  // namespace octavo",
        '#include "engine.h"\n',
    ]
    return "\n\n".join(parts)


def _constants(ctx: Context) -> str:
    states = [cast(KV, v.type) for v in ctx.graph.inputs if isinstance(v.type, KV)]
    sizes = ", ".join(str(block_bytes(kv)) for kv in states)
    return (
        f"constexpr int64_t BLOCK_BYTES[] = {{{sizes}}};\n"
        f"constexpr int32_t NUM_WEIGHTS = {len(ctx.weights.order)};\n"
        f"constexpr int64_t VOCAB_SIZE = {shape_of(ctx.graph.outputs[0])[-1]};\n"
        f'static_assert(PARTIAL_SLOTS == {PARTIALS}, "the plan\'s scratch space is for so many");\n\n'
        "template <class T>\n"
        "INLINE const T* weight(const void* const* all, int index) {\n"
        "  return static_cast<const T*>(all[index]);\n}"
    )


def _body(ctx: Context) -> str:
    graph = ctx.graph
    lines = [
        "  const int64_t T = s.num_tokens, R = s.num_requests, Q = s.num_rows;",
        "  (void)T, (void)R, (void)Q;",
        *_inputs(ctx),
        *_buffers(graph),
    ]
    declared: set[str] = set()
    order = Order()
    for number, kernel in enumerate(ctx.schedule.kernels):
        statements = print_kernel(ctx, kernel)
        reads, writes = _touches(ctx, kernel)
        if order.needs_barrier(reads, writes, kernel.ops[0].kind in SHARING):
            lines.append("  th.sync();")
        lines += [""] + [f"  {comment(describe(op))}" for op in kernel.ops]
        lines += _declare(ctx, kernel, declared)
        lines.append(f"  th.mark({number});")
        several = len(statements) > 1
        lines += (
            ["  {"] * several + [f"{'    ' if several else '  '}{s}" for s in statements] + ["  }"] * several
        )
    lines += _deliver(ctx)
    return "\n".join(lines) + "\n"


def _inputs(ctx: Context) -> list[str]:
    """Names for the step's arrays."""
    lines: list[str] = []
    read = {v.name for op in ctx.graph.ops for v in op.values}
    for value in ctx.graph.inputs:
        if isinstance(value.type, KV) or value.name not in read:
            continue
        name = value.name.rstrip("0123456789")
        group = value.name[len(name) :]
        if value.name in STEP_INPUTS:
            source = f"s.{value.name}"
        elif name in ("slots", "table") and group:
            source = f"s.groups[{group}].{name}"
        else:
            raise CodegenError(f"graph @{ctx.graph.name}: the step has no input %{value.name}")
        lines.append(f"  [[maybe_unused]] const int32_t* {ctx.identifiers[value.name]} = {source};")
    return lines


def _buffers(graph: Graph) -> list[str]:
    """The arena's buffers, one after the other; sizes are for T, R and Q rounded up to 16."""
    lines = [
        "  const auto up = [](int64_t n) { return (n + 15) / 16 * 16; };",
        "  char* arena = (char*)s.arena;",
    ]
    for index, dim in enumerate(graph.arena):
        text = "".join(f"up({c})" if c in "TRQ" else c for c in size(dim))
        lines.append(f"  char* b{index} = arena;")
        lines.append(f"  arena += {text};")
    return lines


def _declare(ctx: Context, kernel: Kernel, declared: set[str]) -> list[str]:
    """Pointers to what the kernel writes."""
    lines: list[str] = []
    for op in kernel.ops:
        at = op.attr("at")
        for index, out in enumerate(op.outs):
            owns = out.name in ctx.places and ctx.places[out.name].root == out.name
            if not owns or out.name in kernel.inside or out.name in declared:
                continue
            declared.add(out.name)
            kind = stored_ctype(tensor_of(out).dtype)
            source = "s.logits" if out.name == ctx.schedule.logits else f"({kind}*)b{at[index]}"
            lines.append(f"  {kind}* {ctx.identifiers[out.name]} = {source};")
        if scratch_bytes(op) != 0:
            lines.append(f"  float* {ctx.scratch(op)} = (float*)b{at[-1]};")
    return lines


def _touches(ctx: Context, kernel: Kernel) -> tuple[set[str], set[str]]:
    """Names of the memory that a kernel reads and writes: buffers, KV groups, the caller's arrays."""

    def memory(value: Value) -> str | None:
        if isinstance(value.type, KV):
            return f"kv{ctx.kv_group[value.name]}"
        root = ctx.schedule.root(value.name)
        if value.name in kernel.inside or root is None:
            return None
        return f"%{root}" if root in ctx.schedule.given else f"b{ctx.buffer[root]}"

    made = {o.name for op in kernel.ops for o in op.outs}
    reads = {memory(v) for op in kernel.ops for v in op.values if v.name not in made}
    writes = {memory(o) for op in kernel.ops for o in op.outs}
    writes |= {f"b{op.attr('at')[-1]}" for op in kernel.ops if scratch_bytes(op) != 0}
    return {m for m in reads if m}, {m for m in writes if m}


def print_kernel(ctx: Context, kernel: Kernel) -> list[str]:
    """A kernel's statements. Raises CodegenError where the target has none for it."""
    op = kernel.ops[0]
    try:
        if groupable(op, ctx.schedule.constants):
            return _pointwise(ctx, kernel)
        if op.kind not in KERNELS:
            raise refuse(op, "the target has none for this kind")
        return KERNELS[op.kind](ctx, op)
    except (ValueError, KeyError) as error:
        found = error if isinstance(error, CodegenError) else refuse(op, str(error))
        raise CodegenError(found.reason, found.op or op, kernel.ops) from error


def _pointwise(ctx: Context, kernel: Kernel) -> list[str]:
    shape = shape_of(kernel.ops[0].out)
    inputs: dict[str, Operand] = {}
    outputs: dict[str, Operand] = {}
    made = {o.name for op in kernel.ops for o in op.outs}
    for op in kernel.ops:
        for arg in op.args:
            if isinstance(arg, Weight) or (isinstance(arg, Value) and arg.name not in made):
                inputs.setdefault(key(arg), _operand(ctx, arg, shape))
        if op.out.name not in kernel.inside:
            outputs[key(op.out)] = _operand(ctx, op.out, shape)
    text, args = print_group(Group(kernel.ops, shape, inputs, outputs))
    return [f"{ctx.function(text, 'pointwise')}({', '.join(args)});"]


def _operand(ctx: Context, arg: Value | Weight, shape: tuple[object, ...]) -> Operand:
    type_ = tensor_of(arg)
    pointer = ctx.pointer(arg)
    if ctx.is_constant(arg):
        _, packed = ctx.weights.use(arg, "plain")
        type_ = Tensor(packed.dtype, type_.shape)
    first, strides = operand_strides(type_, cast("tuple[int, ...]", shape), ctx.ld(arg))
    return Operand(type_, pointer, str(first), strides)


def _deliver(ctx: Context) -> list[str]:
    """Copy the logits to the caller where no kernel could write them there."""
    if ctx.schedule.logits is not None:
        return []
    out = ctx.graph.outputs[0]
    width = shape_of(out)[-1]
    rows = size(shape_of(out)[0])
    return [
        "  th.sync();",
        f"  copy_parts(th, {ctx.pointer(out)}, {ctx.ld(out)}, 0, s.logits, {width}, 0, {rows}, 1, {width});",
    ]
