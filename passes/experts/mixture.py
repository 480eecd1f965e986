"""Reading one mixture of experts: what a value is for each slot, and how slots are laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ir.dims import Dim
from ir.graph import Arg, Op, Scalar, Value
from ir.ops import OPS
from ir.rewrite import View
from passes.experts.cases import Case, Number, Routed, Shared, moved
from passes.experts.layout import (
    Atom,
    Layout,
    Unseen,
    arranged,
    features,
    fitted,
    has,
    of_kind,
    regrouped,
    transposed,
)
from passes.match import is_constant, shape

Args = tuple[Arg, ...]  # one value with experts as an axis, or a value for each expert
Rule = Callable[["Mixture", Sequence[Op], Args, Layout], Case]


@dataclass
class Mixture:
    """Of `count` experts, of which `indices` [tokens, k] are chosen. rules: by the kind of op; "": of any
    other.
    """

    view: View
    count: int
    indices: Value
    rules: Mapping[str, Rule]
    known: dict[Any, Case] = field(default_factory=dict[Any, Case])

    @property
    def rank(self) -> int:
        """Axes of tokens."""
        return len(shape(self.indices)) - 1

    @property
    def tokens(self) -> tuple[Dim, ...]:
        return shape(self.indices)[:-1]

    @property
    def num_slots(self) -> Dim:
        return shape(self.indices)[-1]

    @property
    def slots(self) -> tuple[Atom, ...]:
        """An axis of slots."""
        return () if self.num_slots == 1 else (Atom("k", self.num_slots),)

    @property
    def experts(self) -> tuple[Atom, ...]:
        """An axis of experts."""
        return (Atom("e", self.count),)

    def case(self, args: Args, layout: Layout) -> Case:
        """Raises Unseen."""
        if len(set(args)) == 1:
            args = args[:1]
        first = args[0]
        if isinstance(first, Scalar):
            return self._literal(args)
        if any(shape(a) != shape(first) for a in args):
            raise Unseen("the experts' values differ in shape")
        layout = fitted(layout, shape(first))
        if len(args) == 1 and not has(layout, "e"):
            return Shared(first, layout)
        key = args, layout
        if key not in self.known:
            self.known[key] = self._made(args, layout)
        return self.known[key]

    def _literal(self, args: Args) -> Case:
        if len(args) == 1:
            return Shared(args[0])
        if args == tuple(map(Scalar, range(self.count))):
            return Number()
        raise Unseen("a literal differs between the experts")

    def _made(self, args: Args, layout: Layout) -> Case:
        if all(is_constant(self.view, a) for a in args):
            return self._constants(args, layout)
        makers = [self.view.producer(a) for a in args]
        ops = [op for op in makers if op is not None]
        if len(ops) < len(args) or len({op.kind for op in ops}) > 1:
            raise Unseen("the experts are not computed alike")
        kind = ops[0].kind
        rule = self.rules.get(kind) or (self.rules[""] if OPS[kind].pointwise else None)
        found = self._gathered(args, layout) if rule is None else rule(self, ops, args, layout)
        if isinstance(found, Routed) and has(layout, "k"):
            raise Unseen(f"{kind} computes with slots and experts at once")
        return found

    def _constants(self, args: Args, layout: Layout) -> Case:
        """Rows of weights by the expert: [E, features]."""
        wanted = features(layout)
        if len(args) == 1 and not wanted and self._counts(args[0]):
            return Number()
        if len(args) == 1:
            order = [*self.experts, *wanted]
            table = arranged(self.view, args[0], layout, order, [a.size for a in order])
        else:
            sizes = (1, *(a.size for a in wanted))
            parts = [arranged(self.view, a, layout, wanted, sizes) for a in args]
            table = self.view.op("concat", *parts, axis=0)
        return Routed(self.view.op("take", table, self.indices, axis=0), wanted, None)

    def _counts(self, arg: Arg) -> bool:
        """Whether it is 0, 1, .. along the experts, whose axis is its only one."""
        while (move := moved(self.view, arg)) is not None and move.kind != "expand":
            arg = move.args[0]
        return self.view.made_by(arg, "iota") is not None

    def _gathered(self, args: Args, layout: Layout) -> Case:
        """A number for each token and expert, whatever it is computed by."""
        if len(args) != 1 or features(layout) or has(layout, "k"):
            raise Unseen("what it is for one expert is not seen")
        order = [*of_kind(layout, "t"), *self.experts]
        scores = arranged(self.view, args[0], layout, order, (*self.tokens, self.count))
        return Routed(self.view.op("take_along", scores, self.indices), (), None)

    # --- the value for each slot

    def form(self, case: Case, wanted: Sequence[Atom]) -> Value | Scalar:
        """[tokens, k, features]: 1 for what it is the same for. A literal stays one. Raises Unseen."""
        if isinstance(case, Shared):
            return case.arg if isinstance(case.arg, Scalar) else self._shared_form(case, wanted)
        if not isinstance(case, Routed):
            raise Unseen("an expert's number is computed with, not compared")
        if isinstance(case.slot, Scalar) or len(wanted) == len(case.features):
            return case.slot
        sizes = (a.size if a in case.features else 1 for a in wanted)
        return self.view.op("reshape", case.slot, shape=(*shape(case.slot)[: self.rank + 1], *sizes))

    def _shared_form(self, case: Shared, wanted: Sequence[Atom]) -> Value:
        tokens, slots = of_kind(case.layout, "t"), of_kind(case.layout, "k")
        own = [a for a in wanted if a in features(case.layout)]
        if len(own) != len(features(case.layout)):
            raise Unseen("its features are not those of what reads it")
        lead = self.tokens if tokens else (1,) * self.rank
        sizes = (*lead, self.num_slots if slots else 1, *(a.size if a in own else 1 for a in wanted))
        return arranged(self.view, case.arg, case.layout, [*tokens, *slots, *own], sizes)

    def full(self, case: Case, wanted: Sequence[Atom]) -> Value:
        """[tokens, k, features] of these sizes. Raises Unseen."""
        found = self.form(case, wanted)
        sizes = (*shape(self.indices), *(a.size for a in wanted))
        if isinstance(found, Scalar):
            raise Unseen("the experts give a number")
        return found if shape(found) == sizes else self.view.op("expand", found, shape=sizes)

    def laid_out(self, case: Case, layout: Layout, sizes: Sequence[Dim]) -> Value:
        """For each slot, with slots and features where the layout has them. Raises Unseen."""
        wanted = features(layout)
        atoms = [*of_kind(layout, "t"), *self.slots, *wanted]
        flat = self.view.op("reshape", self.full(case, wanted), shape=tuple(a.size for a in atoms))
        order = [a for axis in layout for a in axis]
        return arranged(self.view, flat, tuple((a,) for a in atoms), order, sizes)

    def is_choice(self, arg: Arg, layout: Layout) -> bool:
        """Whether a value is the indices, whatever axes it has besides. Raises Unseen."""
        if arg == self.indices:
            return layout[-1] == self.slots and not has(layout, "f") and not has(layout, "e")
        op = moved(self.view, arg)
        if op is None:
            return False
        before = shape(op.args[0])
        if op.kind == "transpose":
            layout = transposed(layout, cast("tuple[int, ...]", op.attrs["perm"]))
        layout = regrouped(layout, before) if op.kind == "reshape" else layout
        return self.is_choice(op.args[0], fitted(layout, before))
