"""State beyond keys and values, in an exported program that is refused: what it keeps of earlier tokens.

A recurrence that no op stands for is a loop over the length, whose number of rounds the trace has fixed. So a
program that is refused for a guard, that one or another, is named for what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from compiler.importers.refused import ImportRefused
from passes.paging.rules import STATE

TODO = (
    "Write a linear recurrence for all tokens at once, as masked products or running sums, or choose a model "
    "whose layers have none but those"
)


def as_state(refused: Sequence[tuple[Any, ImportRefused]], program: Any) -> ImportRefused:
    """The refusal of the first of some guards, torch's on shapes, or of the first that shows such a loop."""
    for guard, refusal in refused:
        if _fixes_rounds(guard.expr):
            what = f"a loop over the sequence, such as a recurrence, {STATE}: {refusal.what}"
            found, node = ImportRefused(what, where=refusal.where, todo=TODO), _node_at(program, guard)
            return found if node is None else found.at(str(node.target), _module(node), refusal.where)
    return refused[0][1]


def _module(node: Any) -> str:
    from compiler.importers.aten import module_path

    return module_path(node, "model")


def _fixes_rounds(expr: Any) -> bool:
    """A number that is computed from the length, and that must be what it was in the trace."""
    return (
        type(expr).__name__ == "Equality" and bool(expr.free_symbols) and any(a.is_Integer for a in expr.args)
    )


def _node_at(program: Any, guard: Any) -> Any:
    """The first op of the line that a guard comes from; None where nothing of its file was traced.

    torch keeps those frames of an op that are of modules' forwards. So a function is known by the line that
    calls it, or that makes the most ops, as a loop does whose rounds are written out.
    """
    frame = guard.sloc.framework_loc
    if frame is None:
        return None
    file = f'File "{frame.filename}", line '
    traces = [(node, node.meta.get("stack_trace") or "") for node in program.graph.nodes]
    traces = [(node, trace) for node, trace in traces if file in trace]
    for part in (f"{file}{frame.lineno},", f"{frame.name}("):
        found = next((node for node, trace in traces if part in trace), None)
        if found is not None:
            return found
    counts = Counter(trace for _, trace in traces)
    return next((node for node, trace in traces if counts[trace] == max(counts.values())), None)
