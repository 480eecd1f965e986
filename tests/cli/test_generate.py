"""What `octavo generate` asks of the engine, and prints of its samples and beams."""

from __future__ import annotations

import json

import pytest

import runtime
from compiler.cli.main import main
from runtime import Request, Sampling
from tests.runtime.fake import fake_engine

PROMPT = [3, 1, 4, 1, 5]
NOTE = "octavo: all samples are the same at --temperature 0\n"


class WithoutTokenizer:
    """An engine that takes every text for one prompt."""

    def __init__(self, *_: object, **__: object) -> None:
        self.engine = fake_engine()

    def __enter__(self) -> WithoutTokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def submit(self, _: str, sampling: Sampling, timeout_s: float | None) -> Request:
        return self.engine.submit(PROMPT, sampling, timeout_s=timeout_s)


def generate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> list[str]:
    """Standard output and standard error."""
    monkeypatch.setattr(runtime, "load", WithoutTokenizer)
    with pytest.raises(SystemExit) as end:
        main(["generate", "any.octavo", "hi", "--max-new-tokens", "5", *args])
    assert not end.value.code
    return list(capsys.readouterr())


def test_beams_are_printed_with_their_scores(monkeypatch, capsys):
    args = ("--beams", "4", "-n", "2", "--length-penalty", "0.5")
    out, err = generate(monkeypatch, capsys, *args)
    with fake_engine() as engine:
        request = engine.submit(PROMPT, Sampling(5, beams=4, n=2, length_penalty=0.5))
        scores = [completion.score for completion in request.results()]
    heads = [line for line in out.splitlines() if line.startswith("---")]
    assert heads == [f"--- sample {i} (length, score {score:.4f})" for i, score in enumerate(scores)]
    assert err == ""


def test_penalties_and_biases_are_the_samplings(monkeypatch, capsys):
    args = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.25"]
    out, _ = generate(monkeypatch, capsys, *args, "--logit-bias", "9=50", "--logit-bias", "8=49.5", "--json")
    sampling = Sampling(
        5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={8: 49.5, 9: 50},
    )
    with fake_engine() as engine:
        want = engine.submit(PROMPT, sampling).result().token_ids
    assert json.loads(out)["token_ids"] == want and set(want) <= {8, 9}


@pytest.mark.parametrize(
    ("args", "note"),
    [
        (["-n", "3"], NOTE),
        (["-n", "3", "--temperature", "1"], ""),
        ([], ""),
        (["-n", "2", "--beams", "2"], ""),
    ],
)
def test_samples_that_must_be_alike_are_said_to_be(monkeypatch, capsys, args, note):
    out, err = generate(monkeypatch, capsys, *args)
    assert err == note and out.count("--- sample") == (0 if not args else int(args[1]))
