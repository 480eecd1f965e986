"""cos and sin whose last axis says everything twice, and the same on one half of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ir.dims import product
from ir.graph import Arg, Op, Value
from ir.rewrite import View
from passes.match import POINTWISE, attribute, last_axis, shape
from passes.rotary.pairs import pair_of


@dataclass(frozen=True)
class Angles:
    """doubled(x): whether x is (h, h), or each element of h twice if interleaved. half(x): that h, computed
    by the same ops on half of the elements."""

    view: View
    interleaved: bool

    def doubled(self, arg: Arg) -> bool:
        op = self.view.producer(arg)
        if op is None or len(op.outs) != 1:
            return False
        if self._source(op) is not None:
            return True
        if op.kind in POINTWISE:
            wide = [a for a in op.args if self._is_wide(a, op)]
            return bool(wide) and all(self.doubled(a) for a in wide)
        return self._keeps_last_axis(op) and self.doubled(op.args[0])

    def half(self, arg: Arg) -> Arg:
        op = cast(Op, self.view.producer(arg))
        source = self._source(op)
        if source is not None:
            return source
        if op.kind in POINTWISE:
            args = [self.half(a) if self._is_wide(a, op) else a for a in op.args]
            return self.view.op(op.kind, *args, loc=op.loc, **op.attrs)
        attrs = dict(op.attrs)
        if "shape" in attrs:
            width = cast(int, shape(op.out)[-1]) // 2
            attrs["shape"] = (*attrs["shape"][:-1], width)
        return self.view.op(op.kind, self.half(op.args[0]), *op.args[1:], loc=op.loc, **attrs)

    def _source(self, op: Op) -> Arg:
        """h, where an op puts two of it together."""
        pair = pair_of(self.view, op.out, op) if op.kind in ("concat", "reshape") else None
        if pair is not None:
            same = pair.first == pair.second and 2 * product(shape(pair.first)[-1:]) == shape(op.out)[-1]
            return pair.first if same and pair.interleaved == self.interleaved else None
        return self._repeated(op) if op.kind == "reshape" else None

    def _repeated(self, op: Op) -> Arg:
        """h repeated by expand: [..,P,1] to [..,P,2] (each element twice), or [..,1,P] to [..,2,P]."""
        expand = self.view.made_by(op.args[0], "expand")
        apart = self.view.made_by(expand.args[0], "reshape") if expand is not None else None
        if expand is None or apart is None:
            return None
        h = shape(apart.args[0])
        one, two = ((*h, 1), (*h, 2)) if self.interleaved else ((*h[:-1], 1, *h[-1:]), (*h[:-1], 2, *h[-1:]))
        joined = shape(apart.out) == one and shape(expand.out) == two and shape(op.out)[:-1] == h[:-1]
        return apart.args[0] if joined else None

    @staticmethod
    def _is_wide(arg: Arg, op: Op) -> bool:
        """Whether an operand varies along the last axis of the result."""
        return bool(shape(arg)) and shape(arg)[-1] != 1 and shape(arg)[-1] == shape(op.out)[-1]

    @staticmethod
    def _keeps_last_axis(op: Op) -> bool:
        if not op.args or not isinstance(op.args[0], Value) or not shape(op.out):
            return False
        x, last = op.args[0], last_axis(op.args[0])
        if op.kind in ("reshape", "expand"):
            return shape(x)[-1:] == shape(op.out)[-1:]
        if op.kind == "transpose":
            return op.attr("perm")[-1] == last
        return op.kind in ("slice", "take") and attribute(op, "axis") != last
