"""`octavo compile` of a small model that needs no torch: the importer is replaced by one that makes it.

Run as a program it imports once and then forks a process for each compile: it reads a JSON object a line,
with `args`, `env`, and `out`, the file for what the process says. It answers with the process's number, and
with its exit code when it has ended. At the stage that begins with $WAIT_AT, and in removing what was half
written where $WAIT_IN_CLEANUP is set, a compile makes a file $MARK and waits.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from compiler import driver, importers
from compiler.cli.main import main
from compiler.cli.terminal import Terminal
from compiler.importers import Imported, ModelInfo
from compiler.survey import Survey
from compiler.weights import ArraySource
from tests.passes.test_page_kv import VOCAB, two_layers, weights

_stage, _rmtree = Terminal.stage, shutil.rmtree
_ARRAYS = weights(two_layers())


def made(
    source: Any,
    *,
    max_context: int | None = None,
    weights: bool = True,
    keep_grid: bool = False,
    example_inputs: Any = None,
) -> Imported:
    info = ModelInfo("made", VOCAB, max_context or 64, source_kind="huggingface")
    return Imported(two_layers(), ArraySource(_ARRAYS), info)


def _waiting_stage(self: Terminal, name: str) -> None:
    _stage(self, name)
    if name.startswith(os.environ.get("WAIT_AT", "-")):
        _mark("stage")
        time.sleep(60)


def _waiting_rmtree(path: Any, **options: Any) -> None:
    if os.environ.get("WAIT_IN_CLEANUP"):
        _mark("cleanup")
        time.sleep(0.5)
    _rmtree(path, **options)


def _mark(name: str) -> None:
    Path(f"{os.environ['MARK']}.{name}").touch()


def replace_importer() -> None:
    importers.load = made
    driver.survey = lambda source, *, weights: Survey("huggingface", 1000, [100, 200], 64)
    Terminal.stage = _waiting_stage
    shutil.rmtree = _waiting_rmtree  # type: ignore[assignment]


def _run(case: dict[str, Any]) -> int:
    said = os.open(case["out"], os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(case["env"])
    try:
        main(case["args"])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
    return 0


def serve() -> None:
    replace_importer()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os._exit(_run(json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
