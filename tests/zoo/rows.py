"""What one model type of tests/data/zoo comes to: right, wrong, or refused, and whether that was expected."""

from __future__ import annotations

import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from compiler.errors import CompileError
from compiler.explanation import Asked, explain
from compiler.importers.installed import tiny_config
from compiler.importers.tiny_config import CONTEXT
from passes.paging.rules import STATE
from tests.model.forced import PROMPT_LENGTHS, TOLERANCE
from tests.zoo.case import Case, unnoticed
from tests.zoo.models import DATA
from tests.zoo.models import REFUSED as MAY_REFUSE

NUM_SEEDS = 3
RIGHT, WRONG, REFUSED = "right", "wrong", "refused"


@dataclass(frozen=True)
class Row:
    """error: the worst over prompts and seeds, in standard deviations. reason: of a refusal, or what is
    wrong. expected: whether the outcome is what the data says."""

    model_type: str
    outcome: str
    error: float | None
    reason: str
    expected: bool
    seconds: float

    def __str__(self) -> str:
        error = "" if self.error is None else f"{self.error:.1e}"
        mark = " " if self.expected else "!"
        return f"{mark} {self.model_type:26} {self.outcome:8} {error:9} {self.reason[:300]}".rstrip()


def row_of(model_type: str, num_seeds: int = NUM_SEEDS) -> Row:
    start, error, reason = time.perf_counter(), None, ""
    try:
        error, reason = _tried(model_type, num_seeds)
        outcome = WRONG if reason else RIGHT
    except CompileError as refused:
        outcome, reason = REFUSED, refused.line
    except Exception as fault:  # a fault of the compiler or of this test is a row like any other
        outcome, reason = WRONG, "".join(traceback.format_exception_only(fault)).strip().replace("\n", " ")
    words = MAY_REFUSE.get(model_type)
    expected = outcome == RIGHT if words is None else outcome == REFUSED and words in reason
    return Row(model_type, outcome, error, reason, expected, round(time.perf_counter() - start, 1))


def stateful_row_of(model_type: str) -> Row:
    """Of a type that keeps more of earlier tokens than keys and values: refused for that, with its place."""
    start = time.perf_counter()
    config = tiny_config(model_type, DATA["sizes"].get(model_type))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        refused = explain(Path(folder), Asked(max_context=CONTEXT)).refused
    if refused is None:
        return Row(model_type, WRONG, None, "it compiles", False, round(time.perf_counter() - start, 1))
    reason = f"{refused.stage}: {refused.reason} ({refused.op}, {refused.module or refused.where})"
    is_named = STATE in refused.reason and bool(refused.op) and bool(refused.module or refused.where)
    return Row(model_type, REFUSED, None, reason, is_named, round(time.perf_counter() - start, 1))


def _tried(model_type: str, num_seeds: int) -> tuple[float, str]:
    """The worst error, and what is wrong; "" if nothing is."""
    worst, wrong = 0.0, list[str]()
    for seed in range(num_seeds):
        with tempfile.TemporaryDirectory() as folder:
            case = Case(model_type, seed, Path(folder))
            errors = {length: case.worst(length) for length in PROMPT_LENGTHS}
            worst = max(worst, *errors.values())
            wrong += [f"seed {seed}, prompt of {n}: {e:.1e}" for n, e in errors.items() if not e <= TOLERANCE]
            if seed == 0:
                wrong += [f"{name} at {n} does not show" for n in (17, 70) for name in unnoticed(case, n)]
    return worst, "; ".join(wrong)
