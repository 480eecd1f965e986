"""What the rules of one run share: how scores are read, the tables that masks use, and each mask's proof."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ir.dims import normalize, symbol, upper_bound
from ir.graph import Arg, Graph, Op
from ir.predicates import KEY, QUERY
from ir.rewrite import View
from passes.attention.biases import Biases
from passes.attention.elements import Elements, Unreadable
from passes.attention.indexing import Index, broadcast, shape_of
from passes.attention.keyed import NoBias, Parts, with_key_bias
from passes.attention.proof import ALONE, MaskRefused, how_proved, prove
from passes.attention.scores import Scores, read_scores
from passes.attention.tables import Tables
from passes.base import PassError

SIZE, OUT = symbol("d"), symbol("e")  # an element of a query or key; of a value


def refused(op: Op | None, reason: str, hint: str = "") -> PassError:
    return PassError("fuse_attention", op, reason, hint)


@dataclass
class Prover:
    """Reads and proves the masks of one graph. Raises PassError where a mask is refused.

    how: what was done to prove the mask of each attention, by its result's name.
    """

    graph: Graph
    tables: Tables
    how: dict[str, str] = field(default_factory=dict[str, str])
    _proofs: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def sizes(self, length: Any, **others: Any) -> dict[Any, Any]:
        """Exclusive limits of positions, of other index symbols, and of sizes with an upper bound."""
        highs = {name: high for name, (_, high) in self.graph.dims.items() if high is not None}
        limits = {**{name: high + 1 for name, high in highs.items()}, **others}
        return {**{symbol(name): limit for name, limit in limits.items()}, QUERY: length, KEY: length}

    def elements(self, view: View, sizes: dict[Any, Any]) -> Elements:
        return Elements(view.producer, self.graph.dims, self.tables, sizes)

    def scores(self, op: Op, elements: Elements, arg: Arg, index: Index, has_dot: bool) -> Scores:
        """Scores (or an additive mask) read from their element at (.., q, k)."""
        at = broadcast(index, shape_of(arg))
        try:
            return read_scores(elements.at(arg, at), has_dot)
        except Unreadable as error:
            if (found := self._by_distance(elements, arg, at, has_dot)) is not None:
                return found
            reason = f"the attention mask cannot be shown to be a function of positions: {error.reason}"
            raise refused(error.op or op, reason, ALONE) from None
        except MaskRefused as error:
            if (found := self._by_distance(elements, arg, at, has_dot)) is not None:
                return found
            raise refused(op, error.reason, error.hint or ALONE) from None

    def _by_distance(self, elements: Elements, arg: Arg, index: Index, has_dot: bool) -> Scores | None:
        """Scores to which numbers are added by distance."""
        try:
            found = read_scores(Biases(elements).at(arg, index), has_dot)
        except (Unreadable, MaskRefused):
            return None
        return found if found.distances else None

    def proved(self, op: Op, predicate: Any, length: Any, view: View) -> tuple[Any, tuple[Arg, ...]]:
        """The proved predicate and the tables it reads; each different mask is proved once.

        The caller must keep the ops that are emitted for the tables.
        """
        try:
            if (predicate, length) not in self._proofs:
                context = upper_bound(normalize(length), self.graph.dims)
                self._proofs[predicate, length] = prove(predicate, context, self.tables.grids)
        except MaskRefused as error:
            raise refused(op, error.reason, error.hint) from None
        return self.tables.emit(self._proofs[predicate, length], view.op)

    def keyed(
        self, op: Op, parts: Parts, scores: Scores, elements: Elements, scale: float, view: View
    ) -> Parts:
        """Queries, keys and values that hold what is added to scores of a key's token."""
        if scores.softcap or op.attrs.get("softcap"):
            raise refused(op, "something of the key's token is added to scores after they are capped")
        try:
            return with_key_bias(parts, scores.keyed, elements, scale, view)
        except NoBias as error:
            raise refused(op, str(error), ALONE) from None

    def remember(self, name: str, source: str, scores: Scores, length: Any) -> None:
        """Keep how the mask of the attention with this result was proved; a later sweep proves it again."""
        if name not in self.how:
            context = upper_bound(normalize(length), self.graph.dims)
            more = "; what is added of a key's token is one more element of the key" if scores.keyed else ""
            more += "; what is added by distance is a table" if scores.distances else ""
            self.how[name] = f"{source}, {how_proved(scores.keep, context)}{more}"
