"""python -m tests.fuzz [NAME ...] --minutes 10 [--seed 7]: fuzz readers of untrusted files.

Each runs in a process of its own. A faulty case is kept in build/fuzz, with its number; --case makes and
reads that one again.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.worker import FUZZERS, KEPT, run_worker

ROOT = Path(__file__).parents[2]


def main(args: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(args)
    seed = given.seed or secrets.token_hex(4)
    if given.worker:
        return run_worker(given.names[0], seed, given.minutes, given.cases, given.case)
    failed = [name for name in given.names or FUZZERS if not _in_a_process(name, seed, given)]
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def _in_a_process(name: str, seed: str, given: argparse.Namespace) -> bool:
    """A crash of C code, or one that never ends, takes the worker with it: its number tells the case."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", name, "--worker", "--seed", seed]
    for option in ("minutes", "cases", "case"):
        if getattr(given, option) is not None:
            command += [f"--{option}", str(getattr(given, option))]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code not in (0, 1):
        number = (KEPT / f"{name}.last").read_text()
        print(f"{name}: the process ended with code {code} in case {number}: "
              f"python -m tests.fuzz {name} --case {number}")  # fmt: skip
    return code == 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *FUZZERS], metavar="NAME", help=", ".join(FUZZERS))
    parser.add_argument("--minutes", type=float, help="Of each fuzzer.")
    parser.add_argument("--cases", type=int, help="Of each fuzzer, at most.")
    parser.add_argument("--seed", help="Any text; the same seed makes the same cases. Default: a random one.")
    parser.add_argument("--case", help="SEED-NUMBER: this one alone, with its traceback.")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
