"""Every model type of tests/data/zoo: compiled and compared, or refused as expected. A table, and JSON.

Those that keep more of earlier tokens than keys and values must be refused for that.

python -m tests.zoo [TYPE ...] [--json FILE] [--seeds N] [--workers N]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

from tests.conftest import CXX, OBJECTS

TASKS_A_PROCESS = 12  # then its memory is given back


def main(args: Sequence[str] | None = None) -> int:
    from tests.zoo.models import CORE, STATEFUL
    from tests.zoo.rows import NUM_SEEDS, REFUSED, RIGHT, WRONG, row_of, stateful_row_of

    parser = argparse.ArgumentParser(prog="tests.zoo")
    parser.add_argument("types", nargs="*", help="default: all")
    parser.add_argument("--json", type=Path, default=Path("build/zoo.json"))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="models of random weights of each type")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args(args)
    unknown = set(asked.types) - {*CORE, *STATEFUL}
    if unknown:
        parser.error(f"not in tests/data/zoo/types.json: {', '.join(sorted(unknown))}")
    rows = []
    # Not concurrent.futures: a pool of that whose processes end after some tasks can hang (CPython 115634).
    with get_context("spawn").Pool(asked.workers, maxtasksperchild=TASKS_A_PROCESS) as pool:
        asked_for = asked.types or [*CORE, *STATEFUL]
        core = [name for name in asked_for if name not in STATEFUL]
        stateful = [name for name in asked_for if name in STATEFUL]
        tried = pool.imap(partial(row_of, num_seeds=asked.seeds), core)
        for row in chain(tried, pool.imap(stateful_row_of, stateful)):
            print(row, flush=True)
            rows.append(row)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    counts = {name: sum(row.outcome == name for row in rows) for name in (RIGHT, WRONG, REFUSED)}
    print(f"{len(rows)} types: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    unexpected = [row.model_type for row in rows if not row.expected]
    if unexpected:
        print(f"not as expected: {', '.join(unexpected)}")
    return bool(unexpected)


if __name__ == "__main__":
    os.environ.setdefault("OCTAVO_CACHE", str(OBJECTS))
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    if "CXX" not in os.environ:
        os.environ |= {"CXX": str(CXX), "OCTAVO_TESTS_PRECOMPILED": str(OBJECTS / "precompiled")}
    sys.exit(main())
