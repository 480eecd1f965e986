"""The demo model's logits beside transformers', in float32 and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.model.forced import kl
from tests.model.harness import Stepper
from tests.model.tiny import reference_logits

PROMPTS = (
    "The capital of France is",
    "import numpy as np\n\ndef softmax(x):",
    "El perro come",
    "Q: What is 17 + 25?\nA:",
)

TEXT = """\
A lighthouse is a tower built to help ships find their way at night. The oldest ones burned wood, later
coal and oil, and a keeper had to climb the stairs every few hours to trim the wick and wind the
clockwork that turned the lens. The lens, made of many prisms set in brass, gathered the light of a small
flame into a beam that could be seen twenty miles away. Each tower had its own rhythm of flashes, written
down in books that every captain carried, so that a sailor who counted the seconds between two flashes
knew which coast lay ahead. Storms, fog and loneliness made the work hard; many keepers wrote diaries,
and some of them recorded the weather so faithfully that scientists still use their figures today. When
electric lamps came, the stairs grew quiet, and most towers now run by themselves, visited once or twice
a year by a technician who cleans the glass."""


def test_float32_logits_are_those_of_transformers(
    demo_f32: Path, reference_model: Any, greedy_cases: list[dict[str, Any]]
) -> None:
    ids_of = {case["prompt"]: case["prompt_ids"] for case in greedy_cases}
    stepper = Stepper(demo_f32)
    for prompt in PROMPTS:
        expected = reference_logits(reference_model, ids_of[prompt]).numpy()
        worst = float(np.abs(stepper.logits(ids_of[prompt]) - expected).max())
        print(f"{prompt!r}: max abs difference {worst:.2e}")
        assert worst < 2e-3


def test_bfloat16_is_as_close_to_float32_as_transformers_is(
    demo_f32: Path, demo_bf16: Path, reference_model: Any
) -> None:
    import copy

    ids = text_ids(demo_f32)
    exact = reference_logits(reference_model, ids).numpy()
    theirs = kl(exact, reference_logits(copy.deepcopy(reference_model).bfloat16(), ids).numpy())
    ours = kl(exact, Stepper(demo_bf16).logits(ids))
    print(f"{len(ids)} tokens: mean KL to float32 {ours:.5f}, transformers' bfloat16 {theirs:.5f}")
    assert 0 < ours <= 1.2 * theirs


def text_ids(engine: Path) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(engine / "tokenizer" / "tokenizer.json")).encode(TEXT).ids
