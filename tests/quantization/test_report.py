"""What a manifest says of quantisation, and what octavo inspect makes of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.inspect.quality import draft_quality, quality
from compiler.quantization import report
from compiler.quantization.decide import Decided
from compiler.quantization.gate import Divergence, Measured
from compiler.quantization.layers import LayerError
from compiler.quantization.options import Quantization

ASKED = Quantization("int4", kv="int8").resolved(["cpu"])
LAYERS = tuple(LayerError(f"model.layers.{n}.mlp", f"m{n}", "u4 g32", 0.01 * n, 100) for n in range(7))


def entry(divergence: Divergence) -> dict[str, Any]:
    """As it is once it has been a file."""
    decided = Decided(measured=Measured(divergence, LAYERS, "held-out text"), raised=("a=int8",))
    return json.loads(json.dumps(report.entry(ASKED, decided), allow_nan=False))


def test_lines_say_what_the_manifest_holds() -> None:
    found = entry(Divergence(0.2134567, 1.5, 0.731, 1.25, 1024))
    assert found["error"]["mean_kl"] == 0.2135 and len(found["error"]["layers"]) == 7
    assert quality(found) == [
        "weights int4 in groups of 32 by gptq, activations int8, kv int8; 1 matrices raised",
        "mean KL 0.2135 nats, 99th percentile 1.5, top-1 agreement 73.1%, perplexity times 1.25, over 1,024 "
        "positions of held-out text; bound 0.73",
        "relative error of outputs, each layer alone; the largest:",
        *(f"{n}.00% u4 g32 model.layers.{n}.mlp" for n in (6, 5, 4, 3, 2)),
        "and 2 layers of less error (--json lists all)",
    ]


def test_no_group_or_algorithm_is_named_where_nothing_was_rounded() -> None:
    asked = Quantization("own", kv="int8").resolved(["cpu"])
    found = report.entry(asked, Decided())
    assert found["group"] is None and found["algorithm"] is None
    assert quality(found)[0] == "weights own (the checkpoint's codes), activations int8, kv int8"
    found = report.entry(Quantization(kv="int8").resolved([]), Decided())
    assert found["group"] is None and quality(found)[0] == "weights none, activations none, kv int8"


def test_stacks_that_were_not_fitted_are_named() -> None:
    found = report.entry(ASKED, Decided(nearest=("a.experts.up", "a.experts.down")))
    assert found["nearest"] == ["a.experts.up", "a.experts.down"]
    assert quality(found)[0].startswith("weights int4 in groups of 32 by gptq (2 stacks of experts by rtn), ")
    draft = {**found, "error": None}
    assert draft_quality(draft)[0].startswith("int4 in groups of 32 by gptq (2 stacks of experts by rtn), ")
    older = {k: v for k, v in found.items() if k != "nearest"}
    assert quality(older)[0].startswith("weights int4 in groups of 32 by gptq, ")


def test_numbers_that_are_not_finite_are_null() -> None:
    found = entry(Divergence(float("nan"), np.inf, 0.0, np.inf, 3))
    assert found["error"]["mean_kl"] is None and found["error"]["perplexity_ratio"] is None
    assert "mean KL infinite nats" in quality(found)[1]


def test_what_was_not_measured_or_not_quantised() -> None:
    assert quality(None) == []
    assert quality(report.entry(ASKED, Decided()))[1:] == ["not measured"]
    assert quality({"weights": "int4"}) == ["in a way that this version cannot read (--json shows it)"]


def test_a_divergence_that_is_no_number_is_refused() -> None:
    for kl in (float("nan"), np.inf, 5.0):
        decided = Decided(measured=Measured(Divergence(kl, 1, 0, 1, 3), LAYERS, "held-out text"))
        with pytest.raises(CompileError, match="too far from what it was"):
            report.check(ASKED, decided)


STRANGE = [None, True, -1, 10**400, 1e308, "x", "\x1b[31m\n", "y" * 10**5, [], {}, [1], [None], {"a": 1}]


@pytest.mark.parametrize("value", STRANGE, ids=lambda v: repr(v)[:8])
def test_entries_of_any_kind_are_shown_in_short_lines(value: Any) -> None:
    """A manifest may hold anything where nothing checks it."""
    whole: dict[str, Any] = entry(Divergence(0.2, 1.5, 0.7, 1.25, 9)) | {"raised": ["a"]}
    places = [(whole, k) for k in whole] + [(whole["error"], k) for k in whole["error"]]
    for holder, key in [*places, *((whole["error"]["layers"][0], k) for k in whole["error"]["layers"][0])]:
        kept, holder[key] = holder[key], value
        lines = quality(whole)
        assert lines and all(line.isprintable() and len(line) <= 4000 for line in lines)
        holder[key] = kept
    assert isinstance(quality(value), list)
