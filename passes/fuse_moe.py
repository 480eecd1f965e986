"""A mixture of experts that computes every expert for every token becomes one that computes those chosen.

Three sums are looked at: over an axis of the experts, over it in a matmul, and a chain of additions with a
term for each expert; and a choice of some of a value for each expert. Where a term is seen to be 0 for an
expert that no slot of a token chose (see passes/experts/cases.py), the sum over the experts is the sum over
the slots, in their order. That holds for finite numbers: an expert that gives infinity to a token which did
not choose it makes NaN of 0 times it, and is not computed any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ir.graph import Arg, Graph, Op, Scalar, Value
from ir.ops import InferError
from ir.rewrite import Miss, Replacement, Rule, View, rewrite
from passes.base import Pass, Result, result
from passes.experts.cases import Case, Routed, chosen_by, is_zero, none_of, scores_of
from passes.experts.layout import Layout, Unseen, features, layout_of
from passes.experts.mixture import Mixture
from passes.experts.rules import RULES
from passes.match import attribute, shape

_SUM, _CHAIN, _PICK = "sum over experts", "sum of experts", "choice of experts"
_SEARCH = 24  # ops deep that a term's expert is looked for


@dataclass(frozen=True)
class FuseMoe(Pass):
    def run(self, graph: Graph) -> Result:
        choices = [op for op in graph.ops if op.kind == "topk"]
        if not choices:
            return Result(graph, 0)
        found = _Finder(_depending(graph, {op.outs[1].name for op in choices}), graph.producers())
        return result(rewrite(graph, found.rules))


def _depending(graph: Graph, names: set[str]) -> frozenset[str]:
    """Values that are computed from some of these, and they themselves."""
    for op in graph.ops:
        if any(v.name in names for v in op.values):
            names.update(o.name for o in op.outs)
    return frozenset(names)


@dataclass
class _Finder:
    """routed: names of values that depend on a choice. makers: of the graph before."""

    routed: frozenset[str]
    makers: dict[str, Op]
    terms: dict[str, tuple[int, Value] | None] = field(default_factory=dict[str, "tuple[int, Value] | None"])

    @property
    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule(_SUM, ("sum",), self.sum),
            Rule(_SUM, ("matmul",), self.product),
            Rule(_CHAIN, ("add",), self.chain),
            Rule(_PICK, ("take_along",), self.pick),
        )

    def is_routed(self, arg: Arg) -> bool:
        return isinstance(arg, Value) and arg.name in self.routed

    def sum(self, op: Op, view: View) -> Replacement | Miss | None:
        x, axes = op.args[0], attribute(op, "axes")
        if not self.is_routed(x) or len(axes) != 1:
            return None
        axis: int = axes[0]

        def read(mixture: Mixture, outer: Layout) -> Case:
            rest = outer[axis + 1 :] if attribute(op, "keepdims") else outer[axis:]
            return mixture.case((x,), (*outer[:axis], mixture.experts, *rest))

        return self._tried(_SUM, op, view, x, shape(x)[axis], read)

    def product(self, op: Op, view: View) -> Replacement | Miss | None:
        """Weights [.., 1, E] times values [.., E, N]."""
        x, y = op.args
        if not self.is_routed(x) or len(shape(x)) < 2 or shape(x)[-2] != 1:
            return None

        def read(mixture: Mixture, outer: Layout) -> Case:
            share = mixture.case((x,), (*outer[:-1], mixture.experts))
            value = mixture.case((y,), (*outer[:-2], mixture.experts, outer[-1]))
            wanted = features(outer)
            slots = (mixture.form(c, wanted) for c in (share, value))
            return Routed(view.op("mul", *slots), wanted, none_of(share))

        return self._tried(_SUM, op, view, x, shape(x)[-1], read)

    def pick(self, op: Op, view: View) -> Replacement | Miss | None:
        """Of a value for each expert [.., N, E], those of the slots: [.., N, k]."""
        x, chosen = op.args
        indices = chosen_by(view, chosen)
        if indices is None or len(shape(x)) <= len(shape(indices)):
            return None
        count = shape(scores_of(view, indices))[-1]
        if shape(x)[-1] != count or not isinstance(count, int):
            return None
        mixture = Mixture(view, count, indices, RULES)
        try:
            outer = layout_of(shape(op.out)[:-1])
            if not mixture.is_choice(chosen, (*outer, mixture.slots)):
                raise Unseen("not every feature is of the same expert")
            case = mixture.case((x,), (*outer, mixture.experts))
            return mixture.laid_out(case, (*outer, mixture.slots), shape(op.out))
        except (Unseen, InferError) as why:
            return Miss(_PICK, op, str(why))

    def _tried(
        self, rule: str, op: Op, view: View, start: Arg, count: object,
        read: Callable[[Mixture, Layout], Case],
    ) -> Replacement | Miss | None:  # fmt: skip
        indices = self._choice(start, view)
        if indices is None or not isinstance(count, int) or shape(scores_of(view, indices))[-1] != count:
            return None
        mixture = Mixture(view, count, indices, RULES)
        try:
            outer = layout_of(shape(op.out))
            return self._total(op, view, mixture, read(mixture, outer), outer)
        except (Unseen, InferError) as why:
            return Miss(rule, op, str(why))

    def _total(self, op: Op, view: View, mixture: Mixture, case: Case, outer: Layout) -> Value:
        """The sum over the slots, in the shape that the sum over the experts has."""
        if not is_zero(none_of(case)):
            raise Unseen("what an expert gives a token that did not choose it is not seen to be 0")
        total = view.op("sum", mixture.full(case, features(outer)), axes=(mixture.rank,))
        sizes = shape(op.out)
        return total if shape(total) == sizes else view.op("reshape", total, shape=sizes)

    def _choice(self, arg: Arg, view: View) -> Value | None:
        """The indices of the nearest topk that a value is computed from."""
        waiting, seen = [arg], set[str]()
        while waiting:
            arg = waiting.pop(0)
            if not isinstance(arg, Value) or arg.name in seen or not self.is_routed_now(arg, view):
                continue
            seen.add(arg.name)
            found = chosen_by(view, arg)
            if found is not None:
                return found
            op = view.producer(arg)
            waiting += [] if op is None else op.args
        return None

    def is_routed_now(self, arg: Value, view: View) -> bool:
        return arg.name in self.routed or (view.producer(arg) is not None and arg.name not in self.makers)

    # --- one term for each expert

    def chain(self, op: Op, view: View) -> Replacement | Miss | None:
        if not any(self.is_routed(a) for a in op.args):
            return None
        terms = _terms(op, view)
        by_choice: dict[str, dict[int, list[Value]]] = {}
        for term in terms:
            found = self._expert_of(term, view)
            if found is not None:
                by_choice.setdefault(found[1].name, {}).setdefault(found[0], []).append(term)
        for per_expert in by_choice.values():
            found = self._joined(op, view, terms, per_expert)
            if found is not None:
                return found
        return None

    def _joined(
        self, op: Op, view: View, terms: list[Value], per_expert: dict[int, list[Value]]
    ) -> Replacement | Miss | None:
        first = next(iter(per_expert.values()))[0]
        indices = self._choice(first, view)
        count = shape(scores_of(view, indices))[-1] if indices is not None else 0
        if indices is None or not isinstance(count, int) or sorted(per_expert) != list(range(count)):
            return None
        if count < 2 or any(len(each) != 1 for each in per_expert.values()):
            return Miss(_CHAIN, op, "an expert has more than one term")
        own = tuple(per_expert[e][0] for e in range(count))
        mixture = Mixture(view, count, indices, RULES)
        try:
            outer = layout_of(shape(op.out))
            total: Value = self._total(op, view, mixture, mixture.case(own, outer), outer)
        except (Unseen, InferError) as why:
            return Miss(_CHAIN, op, str(why))
        for rest in (t for t in terms if t not in own):
            total = view.op("add", rest, total)
        return total

    def _expert_of(self, term: Value, view: View) -> tuple[int, Value] | None:
        """The expert's number that a term is compared with or cut out by, and of which choice."""
        if term.name not in self.terms:
            self.terms[term.name] = self._search(term, view)
        return self.terms[term.name]

    def _search(self, term: Value, view: View) -> tuple[int, Value] | None:
        waiting: list[tuple[Arg, int]] = [(term, 0)]
        while waiting:
            arg, depth = waiting.pop(0)
            op = view.producer(arg)
            if op is None or depth > _SEARCH or op.kind in ("linear", "matmul", "moe_linear"):
                continue
            number = self._number(op, view)
            if number is not None:
                return number
            waiting += [(a, depth + 1) for a in op.args if self.is_routed(a)]
        return None

    def _number(self, op: Op, view: View) -> tuple[int, Value] | None:
        if op.kind == "eq":
            for a, b in (op.args, op.args[::-1]):
                chosen = chosen_by(view, a)
                if chosen is not None and isinstance(b, Scalar):
                    return int(b.value), chosen
        if op.kind == "slice" and chosen_by(view, op.args[0]) is None and self.is_routed(op.args[0]):
            start, stop = attribute(op, "start"), attribute(op, "stop")
            chosen = self._choice(op.args[0], view)
            axis: int = attribute(op, "axis")
            size = shape(op.args[0])[axis]
            if chosen is not None and stop - start == 1 and size == shape(scores_of(view, chosen))[-1]:
                return int(start), chosen
        return None


def _terms(op: Op, view: View) -> list[Value]:
    """What a chain of additions adds, in order: values of the result's shape."""
    found: list[Value] = []
    waiting: list[Arg] = [*reversed(op.args)]
    while waiting:
        arg = waiting.pop()
        inner = view.made_by(arg, "add")
        if inner is not None and shape(inner.out) == shape(op.out):
            waiting += reversed(inner.args)
        elif isinstance(arg, Value):
            found.append(arg)
    return found
