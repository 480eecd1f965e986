"""`octavo compile` of a small model that needs no torch: the importer is replaced by one that makes it.

python -m tests.compiler.made compile made -o OUT [...]. At the stage $WAIT_AT (its first words) it prints a line
on stdout, and goes on after a minute.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from compiler import driver, importers
from compiler.cli.main import main
from compiler.cli.terminal import Terminal
from compiler.importers import Imported, ModelInfo
from compiler.survey import Survey
from compiler.weights import ArraySource
from tests.passes.test_page_kv import VOCAB, two_layers, weights


def made(source: Any, *, max_context: int | None = None, weights: bool = True) -> Imported:
    graph = two_layers()
    info = ModelInfo("made", VOCAB, max_context or 64, source_kind="huggingface")
    return Imported(graph, ArraySource(_arrays(graph)), info)


def _arrays(graph: Any) -> dict[str, Any]:
    return {name: array.astype("float32") for name, array in weights(graph).items()}


def waiting(self: Terminal, name: str) -> None:
    _stage(self, name)
    if name.startswith(os.environ.get("WAIT_AT", "-")):
        print("waiting", flush=True)
        time.sleep(60)


_stage = Terminal.stage

if __name__ == "__main__":
    importers.load = made
    driver.survey = lambda source, *, weights: Survey("huggingface", 1000, [100, 200], 64)
    Terminal.stage = waiting
    main(sys.argv[1:])
