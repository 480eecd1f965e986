"""Canonical form of ops that move elements: those that do nothing go, two in a row become one."""

from __future__ import annotations

from ir.graph import Arg, Op
from ir.rewrite import Miss, Replacement, Rule, View
from ir.types import DType
from passes.match import BROADCASTING, attribute, dtype, keeps_type, shape, tensor

_EXACT_WIDENINGS = {  # element type -> those that hold each of its values
    DType.BF16: (DType.F32, DType.F64),
    DType.F16: (DType.F32, DType.F64),
    DType.F32: (DType.F64,),
    DType.BOOL: (DType.I8, DType.U8, DType.I32, DType.I64, DType.F32, DType.F64),
    DType.I8: (DType.I32, DType.I64, DType.F32, DType.F64),
    DType.U8: (DType.I32, DType.I64, DType.F32, DType.F64),
    DType.I32: (DType.I64, DType.F64),
}


def _drop_noop(op: Op, view: View) -> Replacement | Miss:
    """Same type and same order of elements."""
    x = op.args[0]
    if len(op.args) != 1 or len(op.outs) != 1 or tensor(x) != op.out.type:
        return None
    if op.kind == "transpose" and tuple(op.attr("perm")) != tuple(range(len(shape(x)))):
        return None
    if op.kind == "slice" and (attribute(op, "start") != 0 or attribute(op, "step") != 1):
        return None
    return x


def _drop_empty(op: Op, view: View) -> Replacement | Miss:
    """Operands without elements along the axis of a concat."""
    axis = attribute(op, "axis")
    kept = [a for a in op.args if shape(a)[axis] != 0]
    if not kept or len(kept) == len(op.args):
        return None
    return view.op("concat", *kept, axis=axis) if len(kept) > 1 else kept[0]


def _merge_reshapes(op: Op, view: View) -> Replacement | Miss:
    inner = view.made_by(op.args[0], "reshape")
    return None if inner is None else view.op("reshape", inner.args[0], shape=shape(op.out))


def _merge_transposes(op: Op, view: View) -> Replacement | Miss:
    inner = view.made_by(op.args[0], "transpose")
    if inner is None:
        return None
    first, second = tuple(inner.attr("perm")), tuple(op.attr("perm"))
    return view.op("transpose", inner.args[0], perm=tuple(first[p] for p in second))


def _merge_expands(op: Op, view: View) -> Replacement | Miss:
    inner = view.made_by(op.args[0], "expand")
    return None if inner is None else view.op("expand", inner.args[0], shape=shape(op.out))


def _merge_casts(op: Op, view: View) -> Replacement | Miss:
    """A cast of a cast that lost nothing is one cast."""
    inner = view.made_by(op.args[0], "cast")
    source = dtype(inner.args[0]) if inner is not None else None
    if inner is None or source is None or dtype(inner.out) not in _EXACT_WIDENINGS.get(source, ()):
        return None
    to = DType(op.attr("dtype"))
    return inner.args[0] if to is source else view.op("cast", inner.args[0], dtype=str(to))


def _drop_expand_operands(op: Op, view: View) -> Replacement | Miss:
    """A pointwise op broadcasts by itself, unless nothing else gives the result's shape."""
    for index, arg in enumerate(op.args):
        expand = view.made_by(arg, "expand")
        if expand is None:
            continue
        args: list[Arg] = [*op.args[:index], expand.args[0], *op.args[index + 1 :]]
        if keeps_type(op, args):
            return view.op(op.kind, *args, **op.attrs)
    return None


RULES = (
    Rule("drop no-op", ("cast", "reshape", "transpose", "expand", "slice", "concat", "split"), _drop_noop),
    Rule("drop empty operands", ("concat",), _drop_empty),
    Rule("merge reshapes", ("reshape",), _merge_reshapes),
    Rule("merge transposes", ("transpose",), _merge_transposes),
    Rule("merge expands", ("expand",), _merge_expands),
    Rule("merge casts", ("cast",), _merge_casts),
    Rule("drop expand before broadcast", BROADCASTING, _drop_expand_operands),
)
