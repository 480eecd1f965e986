"""One fuzzer in this process: its cases, what became of them, and those that are faults."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

from tests.fuzz.fuzzer import Fuzzer, Tally, make_case, run_case
from tests.fuzz.lines import Lines
from tests.fuzz.watch import Fault, TooLong, Watch

FUZZERS = {
    "safetensors": "safetensors_files",
    "index": "safetensors_files",
    "gguf": "gguf_files",
    "onnx": "onnx_files",
    "ir": "ir_text",
    "passes": "ir_text",
    "artifact": "artifacts",
    "weights": "artifacts",
    "gpu": "artifacts",
    "tokenizer": "templates",
    "template": "templates",
    "config": "configs",
}  # from a fuzzer to its module
KEPT = Path(__file__).parents[2] / "build/fuzz"
TRACED = 10  # of so many cases the lines of one are counted
MOST_FAULTS = 20


def find_fuzzer(name: str) -> Fuzzer:
    found: dict[str, Fuzzer] = {f.name: f for f in import_module(f"tests.fuzz.{FUZZERS[name]}").FUZZERS}
    return found[name]


def run_worker(name: str, seed: str, minutes: float | None, cases: int | None, case: str | None) -> int:
    """0 without a fault, else 1. Prints what became of the cases."""
    fuzzer = find_fuzzer(name)
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="octavo-fuzz-") as place:
        root = Path(place)
        _lay_out(root)
        watch = Watch(root / "case", root / "temporary", evaluates=fuzzer.evaluates)
        _warm_up(fuzzer, root / "case")
        watch.limit_memory()
        run = Run(fuzzer, watch, root / "case")
        if case is not None:
            run.one(case)
        else:
            run.many(seed, minutes, cases)
    print(run.text(seed), flush=True)
    return 1 if run.faults else 0


def _lay_out(root: Path) -> None:
    """A secret beside the case, and a place for temporary files."""
    (root / "outside").mkdir()
    for name in ("secret", "secret.safetensors", "secret.json"):
        (root / "outside" / name).write_bytes(b"a secret")
    (root / "temporary").mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(root / "temporary")


def _warm_up(fuzzer: Fuzzer, folder: Path) -> None:
    """Imports are not what a case takes."""
    for number in range(5):
        make_case(fuzzer, f"warm-{number}", folder)
        try:
            fuzzer.run(folder)
        except Exception:  # judged when it is a case
            pass


class Run:
    """The cases of one fuzzer."""

    def __init__(self, fuzzer: Fuzzer, watch: Watch, folder: Path) -> None:
        self.fuzzer, self.watch, self.folder = fuzzer, watch, folder
        self.tally, self.lines, self.faults = Tally(), Lines(fuzzer.readers), dict[str, str]()
        self._last = KEPT / f"{fuzzer.name}.last"
        self._slowest, self._started = (0.0, ""), time.monotonic()

    def many(self, seed: str, minutes: float | None, cases: int | None) -> None:
        end = time.monotonic() + 60 * (minutes if minutes is not None else 10 if cases is None else 600)
        count = 0
        while time.monotonic() < end and (cases is None or count < cases) and len(self.faults) < MOST_FAULTS:
            self.one(f"{seed}-{count}", traced=count % TRACED == 0)
            count += 1

    def one(self, number: str, *, traced: bool = False) -> None:
        self._last.write_text(number)
        before = time.process_time()
        try:
            run_case(self.fuzzer, number, self.folder, self.watch, self.tally, self.lines if traced else None)
        except (Exception, TooLong) as error:
            self._keep(number, error)
        self._slowest = max(self._slowest, (time.process_time() - before, number))

    def _keep(self, number: str, error: BaseException) -> None:
        """Of each kind of fault the first case."""
        shown = "".join(
            f"{line[:300]}\n" for line in traceback.format_exc(limit=-5, chain=False).splitlines()[:40]
        )
        places = traceback.extract_tb(error.__traceback__)
        kind = f"{type(error).__name__} {places[-1].filename}:{places[-1].lineno}"
        if isinstance(error, Fault):
            kind = f"Fault {str(error)[:60]}"
        if kind in self.faults:
            return
        self.faults[kind] = number
        kept = KEPT / f"{self.fuzzer.name}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.folder, kept, symlinks=True)
        print(f"{self.fuzzer.name}: case {number}, kept in {kept}:\n{shown}", flush=True)

    def text(self, seed: str) -> str:
        took, slowest = time.monotonic() - self._started, self._slowest
        return (
            f"{self.fuzzer.name}: seed {seed}, {took:.0f} s, {len(self.faults)} faults; {self.tally.text()}\n"
            f"  slowest: {slowest[0]:.2f} s, case {slowest[1]}\n{self.lines.text()}"
        )
