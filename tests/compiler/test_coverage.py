"""The table of model types: workers that hang or die cost their own row alone, and the order is kept."""

from __future__ import annotations

import json
import os
import time

import pytest

from compiler.explanation.coverage import COMPILES, REFUSED, UNKNOWN, Coverage, Row, Worker
from compiler.explanation.coverage_text import markdown, summary

ROWS = (
    Row("dense", COMPILES, attention=("causal, window of 11", "causal"), positions=("rotary embedding",)),
    Row(
        "mixed",
        COMPILES,
        attention=("causal, sinks",),
        recurrences=("tokens up to 3 back",),
        experts=("2 of 4",),
    ),
    Row("running", REFUSED, "page_kv", "cumsum | runs", "%x = cumsum", "model.layers.0.mix", state=True),
    Row("large", UNKNOWN, "configuration", "its smallest model has 99,000,000 parameters"),
)


def answer(name: str) -> Row:
    if name == "hangs":
        time.sleep(60)
    if name == "dies":
        os._exit(3)
    print("what a library says")
    return Row(name, COMPILES)


@pytest.fixture
def worker() -> Worker:
    return Worker(answer)


def test_a_worker_outlives_what_hangs_and_what_dies(worker: Worker) -> None:
    try:
        assert worker.ask("one", 30).outcome == COMPILES
        late = worker.ask("hangs", 0.5)
        assert (late.outcome, late.reason) == (REFUSED, "it takes longer than 0.5 s")
        gone = worker.ask("dies", 30)
        assert (gone.outcome, gone.reason) == (REFUSED, "its process ended")
        assert worker.ask("two", 30) == Row("two", COMPILES)
    finally:
        worker.end()


def test_the_table_has_a_line_for_each_type_and_the_counts() -> None:
    text = str(Coverage("5.24.0", ROWS))
    assert [line.split()[0] for line in text.splitlines()[:4]] == ["dense", "mixed", "running", "large"]
    assert "causal, window of 11; causal; rotary embedding" in text
    assert "page_kv: cumsum | runs (model.layers.0.mix)" in text
    assert text.endswith("transformers 5.24.0: 4 model types: 2 compile, 1 refused, 1 without a tiny model\n")


def test_the_page_has_a_table_for_each_outcome() -> None:
    page = markdown(Coverage("5.24.0", ROWS))
    assert "| `dense` | causal, window of 11; causal |  | rotary embedding |  |\n" in page
    assert "| `mixed` | causal, sinks | tokens up to 3 back |  | 2 of 4 |\n" in page
    assert "| `running` | page_kv | cumsum \\| runs | `model.layers.0.mix` |\n" in page
    assert "| `large` | its smallest model has 99,000,000 parameters |\n" in page


def test_json_has_every_field_of_every_row() -> None:
    found = json.loads(json.dumps(Coverage("5.24.0", ROWS).json))
    assert found["transformers"] == "5.24.0" and len(found["types"]) == len(ROWS)
    assert found["types"][2]["state"] is True and found["types"][0]["attention"][1] == "causal"
    assert summary(Coverage("5.24.0", ())) == "0 model types: none"
