"""Beams of the demo model are transformers', texts and scores, alone and in one batch.

tests/data/smollm2_beams.json was made with transformers 5.24.0 from the same GGUF, dequantised to float32:
`generate(ids, num_beams=beams, num_return_sequences=beams, max_new_tokens=..., do_sample=False,
length_penalty=..., early_stopping=..., eos_token_id=ends, pad_token_id=0, return_dict_in_generate=True,
output_scores=True)`; texts are cut to their own length (beam_indices >= 0), scores are sequences_scores. Kept
were the cases whose texts are the same in float64: no choice in them hangs on rounding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import runtime

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_beams.json").read_text())["cases"]
ALONE = 3  # cases that are also run by themselves


def sampling(case: dict[str, Any]) -> runtime.Sampling:
    return runtime.Sampling(
        case["max_new_tokens"],
        beams=case["beams"],
        n=case["beams"],
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        stop_token_ids=case["ends"],
        ignore_eos=True,
        logprobs=0,
    )


def outputs(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.score, c.logprobs, c.finish_reason) for c in completions]


def test_texts_and_scores_are_those_of_transformers(demo_f32: Path) -> None:
    with runtime.load(demo_f32, kv_memory="64MiB") as engine:
        alone = [engine.submit(c["prompt_ids"], sampling(c)).results() for c in CASES[:ALONE]]
        requests = [engine.submit(c["prompt_ids"], sampling(c)) for c in CASES]
        together = [request.results() for request in requests]
    for case, found in zip(CASES, together, strict=True):
        assert [c.token_ids for c in found] == case["token_ids"]
        assert [c.score for c in found] == pytest.approx(case["scores"], abs=1e-4)
    for found, again in zip(alone, together, strict=False):
        assert outputs(again) == outputs(found)  # not a bit may differ
    ended = [text[-1] in case["ends"] for case in CASES for text in case["token_ids"]]
    assert any(ended) and not all(ended)
