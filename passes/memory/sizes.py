"""Bytes that values and kernels need, as linear forms of a step's sizes T, R and Q."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import sympy

from ir.dims import Dim, free_names, normalize, product, symbol
from ir.graph import Op, Value, tensor_of
from ir.types import KV, Tensor
from passes.linears import EXPERTS, experts_of
from passes.match import attribute

SIZES = ("T", "R", "Q")
PARTIALS = 64  # (token, partition) pairs whose attention may be computed apart; attention.h counts on it
SPLITS = 16  # partitions of a decoding request's keys on a GPU; codegen/triton/attention_op.py counts on it
Form = Mapping[str, int]  # bytes as a linear form: a coefficient for each of SIZES, "" the constant


class PlanError(ValueError):
    """Two values that live at once share a buffer, or one does not fit in its own."""


def scratch_name(op: Op) -> str:
    return f"{op.outs[0].name}.scratch"


def scratch_bytes(op: Op, device: str = "cpu") -> Dim:
    """Bytes of scratch space that an op's kernel needs on a kind of device, "cpu" or "gpu"."""
    return _SCRATCH[device](op)


def _cpu_scratch(op: Op) -> Dim:
    if op.kind == "linear":  # rows of floats, of an even number of them
        *rows, width = tensor_of(op.args[0]).shape
        return normalize(sympy.Integer(4) * product(tuple(rows)) * (-(-int(cast(Any, width)) // 2) * 2))
    if op.kind == "qlinear":  # the same, of a multiple of 32: codes or floats, and what quantising gives
        *rows, width = tensor_of(op.args[0]).shape
        return normalize(sympy.Integer(4) * product(tuple(rows)) * (-(-int(cast(Any, width)) // 32) * 32))
    if op.kind in EXPERTS:  # as those above, a row and its place for each slot
        pairs, width = product(tensor_of(op.out).shape[:-1]), int(cast(Any, tensor_of(op.args[0]).shape[-1]))
        step = 2 if op.kind == "moe_linear" else 32
        return normalize(sympy.Integer(4) * pairs * (-(-width // step) * step + 1))
    if op.kind == "paged_attention":
        heads, size = tensor_of(op.out).shape[1:]
        return 4 * PARTIALS * int(heads) * (-(-int(size) // 16) * 16 + 2)
    return 0


def _gpu_scratch(op: Op) -> Dim:
    if op.kind in ("qlinear", "qmoe_linear", "moe_linear"):
        rows = 0 if op.kind == "moe_linear" else _quantized_rows(op)
        lists = 0 if op.kind == "qlinear" else _pair_lists(op)
        return normalize(sympy.Integer(0) + rows + lists)
    return _partial_results(op) if op.kind == "paged_attention" else 0


def _pair_lists(op: Op) -> Dim:
    """The pairs of a token and an expert in order, and three numbers of each tile of them, of which there are
    at most as many as pairs and one more of each expert.
    """
    experts = tensor_of(experts_of(op)).shape
    return normalize(sympy.Integer(16) * product(experts) + 12 * attribute(op, "num_experts"))


def _quantized_rows(op: Op) -> Dim:
    """Codes of x, rows of bytes of a multiple of 16, and then their scales, where x is quantised."""
    if attribute(op, "x_dtype") is None:
        return 0
    *rows, width = tensor_of(op.args[0]).shape
    size, group_size = int(cast(Any, width)), attribute(op, "x_group_size")
    groups = -(-size // group_size) if group_size else 1
    return normalize(sympy.Integer(-(-size // 16) * 16 + 4 * groups) * product(tuple(rows)))


def _partial_results(op: Op) -> Dim:
    """Each request's decoding heads leave one of every partition of its keys, and of its tail."""
    heads, size = (int(cast(Any, d)) for d in tensor_of(op.out).shape[1:])
    kv = cast(KV, cast(Value, op.args[1]).type)
    rows, partitions = kv.streams[0].heads * decode_rows(heads // kv.streams[0].heads), SPLITS + kv.needs_tail
    return normalize(sympy.Integer(4) * symbol("R") * rows * partitions * (size + 2))


def decode_rows(group: int) -> int:
    """Rows of a decoding request's tile for one key/value head: tokens times query heads that share it."""
    return max(16, 1 << (group - 1).bit_length())


_SCRATCH = {"cpu": _cpu_scratch, "gpu": _gpu_scratch}


def bytes_of(type_: Tensor) -> Dim:
    return normalize(sympy.Integer(type_.dtype.size_bytes) * product(type_.shape))


def linear_form(size: Dim) -> Form:
    """Bytes as coefficients of T, R and Q and a constant.

    They are for sizes rounded up to 16, so that every buffer's bytes are a multiple of 64. Raises PlanError
    if the size is not linear in them.
    """
    symbols = tuple(symbol(s) for s in SIZES)
    if free_names(size) and not cast(Any, size).is_polynomial(*symbols):  # ceildiv(T, 16)
        raise PlanError(f"{size} bytes are not a linear form of {', '.join(SIZES)}")
    poly = sympy.Poly(cast(Any, size), *symbols) if free_names(size) else None
    form = {name: 0 for name in (*SIZES, "")}
    if poly is None:
        form[""] = int(cast(Any, size))
    else:
        for powers, coefficient in cast("Iterable[Any]", poly.terms()):
            if sum(powers) > 1 or free_names(coefficient):
                raise PlanError(f"{size} bytes are not a linear form of {', '.join(SIZES)}")
            form[SIZES[powers.index(1)] if any(powers) else ""] = int(coefficient)
    return {k: -(-v // (64 if k == "" else 4)) * (64 if k == "" else 4) for k, v in form.items()}


def form_bytes(form: Form) -> Dim:
    return normalize(sympy.Integer(form[""]) + sum(form[s] * symbol(s) for s in SIZES))


def exceeds(need: Dim, have: Dim) -> bool:
    a, b = linear_form(need), linear_form(have)
    return any(a[k] > b[k] for k in a)
