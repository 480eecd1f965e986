"""Rotary position embedding (arXiv 2104.09864), however written, becomes `rope`.

Two forms: the sum x * cos + rotated(x) * sin, with cos and sin as wide as x, and the concatenation of
x1 * cos - x2 * sin and x2 * cos + x1 * sin, with cos and sin half as wide. In the first, the angles of one
half are computed anew from what was concatenated or repeated: the same numbers. A rotation of part of a head
that is joined to the rest of the head becomes one op on the whole head.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Arg, Graph, Op, Value
from ir.rewrite import Miss, Replacement, Rule, View, rewrite
from passes.base import Pass, Result, result
from passes.match import Lanes, attribute, lanes, last_axis, orders, shape
from passes.rotary.angles import Angles
from passes.rotary.pairs import Pair, halves_of, pair_of

_SUM, _JOIN, _PARTIAL = "rope sum", "rope join", "rope of a part"


@dataclass(frozen=True)
class FuseRope(Pass):
    def run(self, graph: Graph) -> Result:
        return result(rewrite(graph, RULES))


def _sum(op: Op, view: View) -> Replacement | Miss:
    """x * cos + rotated(x) * sin, where rotated(x) is (-x2, x1)."""
    for straight, turned in orders(op):
        left, right = view.made_by(straight, "mul"), view.made_by(turned, "mul")
        if left is None or right is None:
            continue
        for rotated, sin in orders(right):
            pair = pair_of(view, rotated)
            if pair is not None:
                return _rotation(op, left, pair, sin, view)
    return None


def _rotation(op: Op, straight: Op, pair: Pair, sin: Arg, view: View) -> Replacement | Miss:
    first, second = view.made_by(pair.first, "neg"), view.made_by(pair.second, "neg")
    if first is None or second is not None:
        return Miss(_SUM, op, "the rotated half is not (-x2, x1)")
    a, b = lanes(view, pair.second), lanes(view, first.args[0])
    if a is None or b is None:
        return None
    for x, cos in orders(straight):
        whole = lanes(view, x)
        if whole is None or whole.base != a.base or not isinstance(x, Value):
            continue
        if not halves_of(whole, a, b, pair.interleaved):
            return Miss(_SUM, op, "what is rotated is not two halves (or alternate elements) of x")
        if x.type != op.out.type:
            return Miss(_SUM, op, f"cos and sin widen {list(shape(x))} to {list(shape(op.out))}")
        angles = Angles(view, pair.interleaved)
        if not (angles.doubled(cos) and angles.doubled(sin)):
            return Miss(_SUM, op, "cos and sin are not seen to repeat one half")
        return _rope(view, x, angles.half(cos), angles.half(sin), pair.interleaved)
    return Miss(_SUM, op, "another value is rotated than is multiplied by cos")


def _join(op: Op, view: View) -> Replacement | Miss:
    """x1 * cos - x2 * sin beside x2 * cos + x1 * sin."""
    pair = pair_of(view, op.out, op)
    if pair is None:
        return None
    minus, plus = view.made_by(pair.first, "sub"), view.made_by(pair.second, "add")
    if minus is None or plus is None:
        return None
    left, right = (view.made_by(a, "mul") for a in minus.args)
    if left is None or right is None or not all(view.made_by(a, "mul") for a in plus.args):
        return None
    for a, cos in orders(left):
        for b, sin in orders(right):
            if _crossed(plus, a, b, cos, sin, view):
                return _joined(op, a, b, cos, sin, pair.interleaved, view)
    return Miss(_JOIN, op, "the two parts are not one rotation of one pair")


def _crossed(plus: Op, a: Arg, b: Arg, cos: Arg, sin: Arg, view: View) -> bool:
    """Whether a sum is b * cos + a * sin."""
    found = {frozenset(map(_name, p.args)) for p in map(view.producer, plus.args) if p is not None}
    return found == {frozenset((_name(b), _name(cos))), frozenset((_name(a), _name(sin)))}


def _name(arg: Arg) -> str:
    return arg.name if isinstance(arg, Value) else repr(arg)


def _joined(op: Op, a: Arg, b: Arg, cos: Arg, sin: Arg, interleaved: bool, view: View) -> Replacement | Miss:
    first, second = lanes(view, a), lanes(view, b)
    if first is None or second is None or first.base != second.base:
        return Miss(_JOIN, op, "the two halves are not of one value")
    start = min(first.start, second.start)
    whole = Lanes(first.base, start, 1, 2 * first.count, first.flat)
    if not halves_of(whole, first, second, interleaved):
        return Miss(_JOIN, op, "what is rotated is not two halves (or alternate elements) of x")
    if shape(cos)[-1:] != (first.count,) or shape(sin)[-1:] != (first.count,):
        return Miss(_JOIN, op, "cos and sin are not one number per pair")
    return _rope(view, _value(view, whole), cos, sin, interleaved)


def _value(view: View, part: Lanes) -> Value:
    """These elements as a value of their own; step 1."""
    base = part.base
    if part.flat:
        base = view.op("reshape", base, shape=(*shape(base)[:-2], part.width))
    whole = part.whole
    return base if whole else view.op("slice", base, axis=last_axis(base), start=part.start, stop=part.stop)


def _rope(view: View, x: Value, cos: Arg, sin: Arg, interleaved: bool) -> Value:
    return view.op("rope", x, cos, sin, interleaved=True if interleaved else None)


def _partial(op: Op, view: View) -> Replacement | Miss:
    """A rotated slice between the other slices of the same head, in order."""
    ropes = [r for a in op.args if (r := view.made_by(a, "rope")) is not None]
    if len(ropes) != 1 or attribute(op, "axis") != last_axis(op.out):
        return None
    (rope,) = ropes
    if view.num_uses(rope.out) != 1:
        return Miss(_PARTIAL, op, "the rotated part is used elsewhere too")
    rotated = lanes(view, rope.args[0])
    head = _joined_lanes([lanes(view, rope.args[0] if a == rope.out else a) for a in op.args])
    if rotated is None or head is None:
        return Miss(_PARTIAL, op, "the parts joined are not those of one head in order")
    offset = rotated.start - head.start + attribute(rope, "offset")
    x = _value_of(head, rope.args[0], view)
    style = True if attribute(rope, "interleaved") else None
    return view.op("rope", x, *rope.args[1:], interleaved=style, offset=offset or None)


def _joined_lanes(parts: list[Lanes | None]) -> Lanes | None:
    """The elements that parts of one value make together, if each begins where the one before ends."""
    first, end = parts[0], parts[0].start if parts[0] is not None else 0
    for part in parts:
        if first is None or part is None or part.step != 1 or part.start != end:
            return None
        if (part.base, part.flat) != (first.base, first.flat):
            return None
        end = part.stop
    return Lanes(first.base, first.start, 1, end - first.start, first.flat) if first is not None else None


def _value_of(head: Lanes, part: Arg, view: View) -> Value:
    """The value that holds just these elements, if the part was cut from one; else a new slice."""
    cut = view.made_by(part, "slice", "split")
    while cut is not None:
        whole = cut.args[0]
        if isinstance(whole, Value) and lanes(view, whole) == head:
            return whole
        cut = view.made_by(whole, "slice", "split")
    return _value(view, head)


RULES = (
    Rule(_SUM, ("add",), _sum),
    Rule(_JOIN, ("concat", "reshape"), _join),
    Rule(_PARTIAL, ("concat",), _partial),
)
