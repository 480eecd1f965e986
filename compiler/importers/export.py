"""torch.export of a causal language model, with one symbolic length.

Sizes are exported without torch's assumption that they are at least 2, so that a branch on a length of 1 is
a guard like any other. Every guard must hold at each length from 1 to the context; one that does not is
refused with the line it comes from. Guards that torch's own code makes (layout and broadcast decisions
inside an op, which do not change what it computes) may fail at single lengths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import reduce
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import sympy

from compiler.importers.refused import OTHER_OPS, ImportRefused
from compiler.importers.state import as_state

EXAMPLE_LENGTH = 13  # any length but 0 and 1 would do; an odd one is unlikely to be a size of the model
MAX_ISOLATED = 2  # single lengths at which a guard of torch's own code may fail
_ON_SIZES = ("sym_min", "sym_max")  # torch's own functions
MAX_REASON = 1000  # characters of torch's reason that are shown
TRACEABLE = "Change that line so that it depends neither on values of tensors nor on the length"


def export_program(
    module: Any,
    args: tuple[Any, ...],
    context: int,
    supported: frozenset[str],
    alone: list[ImportRefused] | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> Any:
    """The functional ExportedProgram of module(*args), every argument [1, S] with 1 <= S <= context.

    Ops that are not in `supported` are decomposed where torch knows how. alone: gets the refusal of a guard
    that fails at length 1 alone, for a caller who shows that the program is right there too. wanted: asked
    after the trace and before that, which takes longer; where it says no, the result is None. Raises
    ImportRefused where the model cannot be exported for every length.
    """
    import torch
    from torch.fx.experimental import _config

    shape_config: Any = _config

    # a context below the example's length is checked by the guards, not by the example
    size = torch.export.Dim.AUTO(min=1, max=max(context, EXAMPLE_LENGTH))
    with shape_config.patch(backed_size_oblivious=True), quiet():
        try:
            program = torch.export.export(
                module, args, dynamic_shapes=tuple({1: size} for _ in args), strict=False
            )
        except ImportRefused:
            raise
        except Exception as error:
            what = f"torch.export cannot trace it: {_reason(error)}"
            raise ImportRefused(what, where=_line_in(error) or "model", todo=TRACEABLE) from error
        check_guards(program, context, alone)
        return functionalize(program, supported) if wanted() else None


def functionalize(program: Any, supported: frozenset[str]) -> Any:
    """Without in-place ops, and with what is not in `supported` decomposed where torch knows how.

    A program that is so already is left alone: tracing it again would take as long as the export.
    """
    if all(_is_plain(node, supported) for node in program.graph.nodes):
        return program
    import torch
    from torch._decomp import decomposition_table

    table = {**decomposition_table, **torch.export.default_decompositions()}
    unsupported = {op: fn for op, fn in table.items() if str(op) not in supported}
    with quiet():
        try:
            return program.run_decompositions(unsupported)
        except Exception as error:
            what = f"torch.export cannot decompose it: {_first_lines(error)}"
            raise ImportRefused(what, where="model", todo=OTHER_OPS) from error


def _is_plain(node: Any, supported: frozenset[str]) -> bool:
    """Whether a node is an input, an output, arithmetic on sizes, or a supported op without side effects."""
    if node.op in ("placeholder", "output"):
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(node.target) in supported and not schema.is_mutable
    kind, name = type(node.target).__name__, getattr(node.target, "__name__", "")
    return node.op == "call_function" and (kind == "builtin_function_or_method" or name in _ON_SIZES)


def check_guards(program: Any, context: int, alone: list[ImportRefused] | None = None) -> None:
    """Every guard holds at each length up to the context. Raises ImportRefused with its source line; `alone`
    gets it instead where length 1 alone fails."""
    lengths = np.arange(1, context + 1)
    refused: list[tuple[Any, ImportRefused]] = []
    for guard in _guards(program):
        holds = np.broadcast_to(_holds(guard.expr, lengths), lengths.shape)
        failing = lengths[~holds]
        if not len(failing) or (len(failing) <= MAX_ISOLATED and _inside_torch(guard)):
            continue
        refusal = ImportRefused(
            f"the model computes something else at some lengths: it was traced where "
            f"{_over_length(guard.expr)}, which does not hold at length {failing[0]}",
            where=_place(guard),
            todo="Remove the dependence on the length" + _shorter(int(failing[0]) - 1),
        )
        if alone is None or failing.tolist() != [1]:
            refused.append((guard, refusal))
        else:
            alone.append(refusal)
    if refused:
        raise as_state(refused, program)


def _shorter(length: int) -> str:
    return f", or compile with --max-context {length}" if length else ""


def _guards(program: Any) -> list[Any]:
    for node in program.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return list(mode.shape_env.guards)
    return []


def _place(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    return "an unknown line" if frame is None else f"{frame.filename}, line {frame.lineno}, in {frame.name}"


def _over_length(expr: Any) -> Any:
    """A guard as a condition on the length S; every symbol of an export is the one length."""
    return expr.xreplace({s: sympy.Symbol("S") for s in expr.free_symbols if str(s).startswith("s")})


def _inside_torch(guard: Any) -> bool:
    import torch

    frame = guard.sloc.framework_loc
    return frame is not None and str(frame.filename).startswith(str(Path(torch.__file__).parent))


def _holds(expr: Any, lengths: Any) -> Any:
    """The value of a guard at each length; every symbol is the length. False where it cannot be decided."""
    if expr.is_Symbol:
        return lengths if str(expr).startswith("s") else np.False_
    if expr in (sympy.true, sympy.false):
        return np.bool_(bool(expr))
    if expr.is_Integer:
        return np.int64(int(expr))
    compute = _GUARD_OPS.get(type(expr).__name__)
    args = [_holds(a, lengths) for a in expr.args]
    return np.False_ if compute is None else compute(*args)


def _fold(fn: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *args: reduce(fn, args)


_GUARD_OPS: dict[str, Callable[..., Any]] = {
    "Equality": np.equal,
    "Unequality": np.not_equal,
    "LessThan": np.less_equal,
    "StrictLessThan": np.less,
    "GreaterThan": np.greater_equal,
    "StrictGreaterThan": np.greater,
    "And": _fold(np.logical_and),
    "Or": _fold(np.logical_or),
    "Not": np.logical_not,
    "Add": _fold(np.add),
    "Mul": _fold(np.multiply),
    "Min": _fold(np.minimum),
    "Max": _fold(np.maximum),
    "FloorDiv": np.floor_divide,
    "CleanDiv": np.floor_divide,
    "Mod": np.mod,
    "PythonMod": np.mod,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and progress bars of torch and transformers."""
    import logging
    import warnings

    from transformers.utils import logging as transformers_logging

    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    disabled = logging.root.manager.disable
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    if type(error).__name__ == "GuardOnDataDependentSymNode":
        return "it branches on the values of a tensor"
    return _first_lines(error)


def _first_lines(error: Exception, count: int = 4) -> str:
    """What torch says, without its advice to whoever develops torch."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(_ADVICE)]
    return f"{type(error).__name__}: " + " ".join(lines[:count])[:MAX_REASON]


def _line_in(error: Exception) -> str:
    """The last source line that torch names in its error, as `FILE, line N, in FUNCTION`; "" if none."""
    found = re.findall(r'File "([^"\n]+)", line (\d+), in (\S+)', str(error))
    return "{}, line {}, in {}".format(*found[-1]) if found else ""


_ADVICE = (
    "consider using",
    "Caused by:",
    "For ",
    "If you suspect",
    "The following call",
    "  File ",
    "The error above",
)


def symbol_bounds(program: Any) -> int | None:
    """The largest length that an exported program was made for; None where it has no bound."""
    uppers = [r.upper for s, r in program.range_constraints.items() if str(s).startswith("s")]
    finite = [int(u) for u in uppers if getattr(u, "is_Integer", isinstance(u, int))]
    return min(finite, default=None)
