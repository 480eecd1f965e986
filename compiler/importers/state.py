"""State beyond keys and values, in an exported program that is refused: what it keeps of earlier tokens.

A convolution over time is found as an op; a recurrence as a loop over the length, whose number of rounds the
trace has fixed. So what is refused for a guard, or cannot be traced, is named for what it is.
"""

from __future__ import annotations

from typing import Any

from compiler.importers.refused import ImportRefused
from passes.paging.rules import STATE

_CONVOLUTIONS = ("aten.conv1d.default", "aten.conv1d.padding", "aten.convolution.default")
TODO = "Choose a model whose layers keep nothing of earlier tokens but keys and values"


def as_state(refused: ImportRefused, program: Any, guard: Any) -> ImportRefused:
    """The refusal of a guard, as one of state if that is what the model has. guard: torch's, of shapes."""
    for node in program.graph.nodes:
        if str(node.target) in _CONVOLUTIONS and _is_symbolic(node.meta["val"].shape[-1]):
            return _refused(f"a convolution over time {STATE}", node)
    if not _fixes_rounds(guard.expr):
        return refused
    what = f"a loop over the sequence, such as a recurrence, {STATE}: {refused.what}"
    found = ImportRefused(what, where=refused.where, todo=TODO)
    node = _node_at(program, guard)
    return found if node is None else found.at(str(node.target), _module(node), refused.where)


def _refused(what: str, node: Any) -> ImportRefused:
    from compiler.importers.aten import source_line, where

    target, module = str(node.target), _module(node)
    return ImportRefused(what, where=where(node, target, module), todo=TODO).at(
        target, module, source_line(node)
    )


def _module(node: Any) -> str:
    from compiler.importers.aten import module_path

    return module_path(node, "model")


def _is_symbolic(size: Any) -> bool:
    return type(size).__name__ == "SymInt"


def _fixes_rounds(expr: Any) -> bool:
    """A number that is computed from the length, and that must be what it was in the trace."""
    return (
        type(expr).__name__ == "Equality" and bool(expr.free_symbols) and any(a.is_Integer for a in expr.args)
    )


def _node_at(program: Any, guard: Any) -> Any:
    """The first op of the line that a guard comes from; else None."""
    frame = guard.sloc.framework_loc
    if frame is None:
        return None
    place = f'File "{frame.filename}", line {frame.lineno}'
    return next((n for n in program.graph.nodes if place in (n.meta.get("stack_trace") or "")), None)
