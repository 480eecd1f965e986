"""Write what reads the tokens just before one, shifts and short causal convolutions, as attention to one key.

x of the token n places back is an attention whose only key is there: its probability is 1 and its value x, or
0 where no token is so far back, which a sink takes. So the cache holds it, as any window, and every chunk,
fork and format works as for keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import sympy

from ir.dims import free_names, product, symbol
from ir.graph import Arg, Graph, Op, Value
from ir.predicates import CAUSAL, KEY, QUERY, window
from ir.rewrite import Rule, View, rewrite
from passes.base import Pass, Result, result
from passes.lagged import Lagged
from passes.match import attribute, dtype, is_float, operand, shape

S = symbol("S")
MAX_TAPS = 8  # of a convolution; a longer one would be read as so many attentions
HEAD_SIZE = 128  # at most, of the heads that hold a shifted row
KEY_SIZE = 16  # of keys that say nothing
NO_SINK = -1e30  # a sink beside a key of score 0 takes nothing


@dataclass(frozen=True)
class ShiftTokens(Pass):
    def run(self, graph: Graph) -> Result:
        rules = (
            Rule("convolution", ("conv1d",), _convolution),
            Rule("padded convolution", ("slice",), _padded),
            Rule("shift", ("concat", "slice"), _shift),
        )
        return result(rewrite(graph, rules))


def _shift(op: Op, view: View) -> Arg | None:
    """What a cut or a joint brings back to one element for each token, from longer and shorter values."""
    axis, sizes = op.attr("axis"), shape(op.out)
    before = cast("Any", shape(op.args[0])[axis])
    if sizes[axis] != S or axis == 0 or (op.kind == "slice" and (before == S or not free_names(before))):
        return None
    found = Lagged(view, _moved).made(op, op.out, axis)
    if found is None or found == op.out:
        return None
    return found if shape(found) == sizes else view.op("expand", found, shape=sizes)


def _moved(x: Value, axis: int, count: int, view: View) -> Value | None:
    """x [1,..,S,..] of the token `count` places back; None where it is no float or has other sizes."""
    sizes = shape(x)
    rest = [i for i in range(1, len(sizes)) if i != axis]
    if axis == 0 or sizes[0] != 1 or not is_float(x) or not all(isinstance(sizes[i], int) for i in rest):
        return None
    perm = (0, axis, *rest)
    first = x if perm == tuple(range(len(sizes))) else view.op("transpose", x, perm=perm)
    channels = product(tuple(sizes[i] for i in rest))
    rows = first if shape(first) == (1, S, channels) else view.op("reshape", first, shape=(1, S, channels))
    found = _back(rows, count, view)
    if shape(found) != shape(first):
        found = view.op("reshape", found, shape=shape(first))
    if first is x:
        return found
    return view.op("transpose", found, perm=tuple(perm.index(i) for i in range(len(sizes))))


def _convolution(op: Op, view: View) -> Arg | None:
    """A convolution over zeros and [1,C,S] that gives [1,O,S]."""
    if shape(op.out)[2] != S or attribute(op, "padding"):
        return None
    rows = _rows(op, 0, view)
    return None if rows is None else view.op("transpose", rows, perm=(0, 2, 1))


def _padded(op: Op, view: View) -> Arg | None:
    """S results of a convolution of [1,C,S] that has zeros on both sides, or more before it than it needs."""
    conv, start = view.made_by(op.args[0], "conv1d"), attribute(op, "start")
    cut = (attribute(op, "axis"), attribute(op, "step"), shape(op.out)[2:])
    if conv is None or cut != (2, 1, (S,)) or not isinstance(start, int) or start < 0:
        return None
    rows = _rows(conv, start, view)
    return None if rows is None else view.op("transpose", rows, perm=(0, 2, 1))


def _rows(op: Op, at: int, view: View) -> Value | None:
    """Result p + at of a convolution for each token p, as [1,S,O]; None where it looks ahead."""
    w = op.args[1]
    width = shape(w)[2]
    if not isinstance(width, int) or width > MAX_TAPS or shape(op.out)[0] != 1:
        return None
    taps = [_tap(op, at + j * attribute(op, "dilation"), view) for j in range(width)]
    found = [t for t in taps if t is not None]
    return _weighted(op, found, view) if len(found) == width else None


def _tap(op: Op, at: int, view: View) -> Value | None:
    """Element p + at along the axis that a convolution reads, zeros before it included, as [1,S,C]."""
    source, padding = op.args[0], attribute(op, "padding")
    inner = view.producer(source)
    if shape(source)[2] == S and padding:
        return _lagged(source, padding - at, padding, view)
    if padding or inner is None:
        return None
    if inner.kind == "conv1d":
        return _rows(inner, at, view)
    found = Lagged(view, _moved).at(source, 2, at)
    return None if found is None else view.op("transpose", found, perm=(0, 2, 1))


def _lagged(x: Arg, count: Any, most: int, view: View) -> Value | None:
    """x [1,C,S] of `count` tokens back, as [1,S,C]. most: see _back."""
    if not isinstance(count, int) or count < 0:
        return None
    rows = view.op("transpose", x, perm=(0, 2, 1))
    return _back(rows, count, view, most) if count else rows


def _weighted(op: Op, taps: list[Value], view: View) -> Value:
    """The sum over taps [1,S,C] and channels that a convolution makes, its bias added."""
    w, bias, groups = op.args[1], operand(op, 2), attribute(op, "groups")
    outputs, channels, width = (cast(int, n) for n in shape(w))
    if channels == 1 and outputs == groups:
        parts = [view.op("reshape", view.op("slice", w, axis=2, start=j, stop=j + 1), shape=(outputs,))
                 for j in range(len(taps))]  # fmt: skip
        total = view.op("mul", taps[0], parts[0])
        for tap, part in zip(taps[1:], parts[1:], strict=True):
            total = view.op("add", total, view.op("mul", tap, part))
        return total if bias is None else view.op("add", total, bias)
    wide = [view.op("reshape", tap, shape=(1, S, groups * channels, 1)) for tap in taps]
    stacked = view.op("reshape", view.op("concat", *wide, axis=3), shape=(1, S, groups * channels * width))
    step, size = outputs // groups, channels * width
    found: list[Value] = []
    for g in range(groups):
        x = view.op("slice", stacked, axis=2, start=g * size, stop=(g + 1) * size)
        rows = view.op("slice", w, axis=0, start=g * step, stop=(g + 1) * step)
        part = view.op("reshape", rows, shape=(step, size))
        own = None if bias is None else view.op("slice", bias, axis=0, start=g * step, stop=(g + 1) * step)
        found.append(view.op("linear", x, part, *([] if own is None else [own])))
    return found[0] if groups == 1 else view.op("concat", *found, axis=2)


def _back(x: Arg, count: int, view: View, most: int = 0) -> Value:
    """x [1,S,C] of the token `count` places back; zeros where there is none.

    most: how far back others look, so that all have one window and the cache holds x once.
    """
    channels = cast(int, shape(x)[2])
    size = max(d for d in range(1, min(channels, HEAD_SIZE) + 1) if channels % d == 0)
    heads = channels // size
    value = view.op("transpose", view.op("reshape", x, shape=(1, S, heads, size)), perm=(0, 2, 1, 3))
    nothing = view.op("full", shape=(1, heads, S, KEY_SIZE), value=0.0, dtype=str(dtype(x)))
    sinks = view.op("full", shape=(heads,), value=NO_SINK, dtype="f32")
    mask = sympy.And(CAUSAL, window(max(count, most) + 1), sympy.Eq(KEY, QUERY - count))
    found = view.op("attention", nothing, nothing, value, None, sinks, scale=1.0, mask=mask)
    return view.op("reshape", found, shape=(1, S, channels))
