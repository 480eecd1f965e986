"""The mixtures of experts of a layer, before or after paging and quantisation, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import cast

from compiler.explanation.facts import Experts
from ir.graph import Arg, Op, Value, Weight
from ir.ops import OPS
from passes.linears import EXPERTS, bias_of, experts_of
from passes.match import attribute, shape
from passes.routers import READERS, Makers, behind

_LINEARS = ("linear", "qlinear")
_ENDS = READERS | {"topk"}


def mixtures(ops: Sequence[Op], makers: Makers) -> list[Experts]:
    """Of a layer's ops. makers: of the whole graph's values."""
    found: dict[str, list[Op]] = {}
    for op in ops:
        if op.kind in EXPERTS:
            found.setdefault(_chosen(op), []).append(op)
    return [_mixture(group, ops, makers) for group in found.values()]


def _chosen(op: Op) -> str:
    """The name of what says which experts each slot reads."""
    chosen = experts_of(op)
    return chosen.name if isinstance(chosen, Value) else repr(chosen)


def _mixture(group: Sequence[Op], ops: Sequence[Op], makers: Makers) -> Experts:
    last, chosen = group[-1], experts_of(group[0])
    choice = next((op for op in behind(chosen, makers, _ENDS) if op.kind == "topk"), None)
    before = list(behind(choice.args[0], makers, _ENDS)) if choice is not None else []
    router = next((op for op in before if op.kind in _LINEARS), None)
    score = next((op.kind for op in before if op.kind in ("softmax", "sigmoid")), "")
    activation, gated = _activation(group, makers)
    weights = tuple(dict.fromkeys(w.name for op in group for w in _weights(op.args[1], makers)))
    return Experts(
        count=cast(int, last.attrs["num_experts"]),
        chosen=cast(int, shape(chosen)[-1]),
        inner=cast(int, shape(last.args[0])[-1]),
        activation=activation,
        gated=gated,
        bias=any(bias_of(op) is not None for op in group),
        scores=score,
        router="" if router is None else router.loc,
        weights=weights,
        shared=_shared(weights, router, ops, makers),
    )


def _activation(group: Sequence[Op], makers: Makers) -> tuple[str, bool]:
    """Between the first product and the last: an epilogue, or the ops that it is written out in."""
    first, last = group[0], group[-1]
    if attribute(first, "activation") != "none" or attribute(first, "gated"):
        return str(attribute(first, "activation")), bool(attribute(first, "gated"))
    between = [op.kind for op in reversed(list(behind(last.args[0], makers, _ENDS)))]
    shown = dict.fromkeys(kind for kind in between if OPS[kind].pointwise and kind != "cast")
    return " ".join(shown) or "none", "split" in between or "slice" in between or len(group) > 2


def _shared(stacks: Sequence[str], router: Op | None, ops: Iterable[Op], makers: Makers) -> tuple[str, ...]:
    """Modules beside the experts, with linears that every token reads: an epilogue may have given an op
    another place, so that weights say where it is. stacks: their arrays' names.
    """
    outer = ".".join(_common(stacks)[:-1])
    if not outer or outer.rpartition(".")[2].isdigit():  # the layer itself
        return ()
    linears = [op for op in ops if op.kind in _LINEARS and op is not router]
    modules = [w.name.rpartition(".")[0] for op in linears for w in _weights(op.args[1], makers)]
    inside = [m.removeprefix(f"{outer}.").partition(".")[0] for m in modules if m.startswith(f"{outer}.")]
    return tuple(dict.fromkeys(f"{outer}.{name}" for name in inside))


def _common(names: Sequence[str]) -> list[str]:
    """The module that all of these are in, as its path's parts."""
    parts = [name.split(".")[:-1] for name in names]
    same = takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False))
    return [each[0] for each in same]


def _weights(arg: Arg, makers: Makers) -> list[Weight]:
    if isinstance(arg, Weight):
        return [arg]
    op = makers.get(arg.name) if isinstance(arg, Value) else None
    return [] if op is None else [w for a in op.args for w in _weights(a, makers)]
