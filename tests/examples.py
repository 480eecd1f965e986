"""How many examples hypothesis tries: few in CI, and as many as OCTAVO_EXAMPLES says by hand."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import HealthCheck, settings


def examples(few: int, steps: int = 50) -> settings:
    """Settings of one test. steps: of a state machine, at most."""
    return settings(
        max_examples=int(os.environ.get("OCTAVO_EXAMPLES", few)),
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def happened(totals: Counter[str], kinds: tuple[str, ...], *, always: bool = False) -> str:
    """The totals as text. Asserts that each of these kinds is among them, else none was tried: always,
    or where there are many examples; a few may miss one."""
    said = ", ".join(f"{kind} {count}" for kind, count in sorted(totals.items()))
    missing = [kind for kind in kinds if not totals[kind]]
    assert not missing or not (always or "OCTAVO_EXAMPLES" in os.environ), f"never: {missing}; {said}"
    return said
