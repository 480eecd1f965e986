"""Prompts and options that cannot be served: each refused in one line with the option as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

import runtime
from runtime.tokenizer import Tokenizer
from tests.cli.refused import Commands
from tests.runtime import made
from tests.runtime.fake import fake_engine

GENERATE: list[tuple[list[str], str]] = [
    *((["--temperature", v], "--temperature") for v in ("nan", "inf", "-inf", "-1", "1e-20", "", "x")),
    *((["--top-p", v], "--top-p") for v in ("nan", "inf", "0", "-1", "1.5", "")),
    *((["--min-p", v], "--min-p") for v in ("nan", "inf", "-0.5", "2")),
    *((["--top-k", v], "--top-k") for v in ("-1", "1.5", "nan", "9" * 30)),
    *((["--max-new-tokens", v], "--max-new-tokens") for v in ("0", "-1", "9" * 30, "")),
    *((["--seed", v], "--seed") for v in ("-1", "9" * 30, "x")),
    *((["-n", v], "-n") for v in ("0", "-1", "99999")),
    *((["--beams", v], "--beams") for v in ("0", "-1", "99999")),
    *((["--timeout", v], "--timeout") for v in ("0", "-1", "nan", "inf")),
    (["--length-penalty", "nan", "--beams", "2"], "--length-penalty"),
    *((["--repetition-penalty", v], "--repetition-penalty") for v in ("0", "-1", "nan", "x")),
    *((["--presence-penalty", v], "--presence-penalty") for v in ("2.5", "-3", "nan")),
    *((["--frequency-penalty", v], "--frequency-penalty") for v in ("2.5", "-3", "inf")),
    *(
        (["--logit-bias", v], "--logit-bias")
        for v in ("", "7", "7=", "=1", "a=1", "7=x", "7=nan", "7=1=2", "-1=1")
    ),
    (["--logit-bias", "7=1", "--logit-bias", "7=2"], "--logit-bias"),
    (["--beams", "2", "--logit-bias", "7=1"], "--logit-bias"),
    (["--beams", "2", "--temperature", "1"], "--temperature"),
    (["--beams", "2", "-n", "3"], "-n"),
    (["--stop", ""], "--stop"),
    (["--stop", "a", "--stop", ""], "--stop"),
    (["--stop", "a", "--stop", "b", "--stop", "a"], "--stop"),
    (["--logprobs", "-1"], "--logprobs"),
    (["--logprobs", "1001"], "--logprobs"),
    (["--target", "abacus"], ""),
    (["--target", ""], ""),
    (["--acceptance", "rejection"], "--acceptance"),
    (["--acceptance", "always", "--draft", "lookup"], "--acceptance"),
    (["--max-draft-tokens", "4"], "--max-draft-tokens"),
    (["--max-draft-tokens", "0", "--draft", "lookup"], "--max-draft-tokens"),
    (["--nonsense"], "--nonsense"),
    (["--max-new-tokens"], "--max-new-tokens"),
    (["one too many"], "one too many"),
]
MEMORY: list[tuple[list[str], str]] = [
    *((["--kv-memory", v], "--kv-memory") for v in ("x", "", "-1", "0%", "101%", "nan%", "3 zb", "9" * 40)),
    *((["--kv-blocks", v], "--kv-blocks") for v in ("0", "-1", "x", "9" * 30)),
    *((["--swap-memory", v], "--swap-memory") for v in ("x", "-1", "40%")),
    *((["--max-step-tokens", v], "--max-step-tokens") for v in ("0", "-1", "9" * 30)),
    *((["--max-requests", v], "--max-requests") for v in ("0", "-1", "9" * 30)),
    (["--kv-blocks", "1", "--kv-memory", "1"], ""),
]
BENCH: list[tuple[list[str], str]] = [
    *(
        ([name, value], name)
        for name in ("--prompt-tokens", "--new-tokens", "--requests", "--repeats")
        for value in ("0", "-1", "nan", "")
    ),
    (["--context-tokens", "-1"], "--context-tokens"),
    (["--context-tokens", "7"], "--context-tokens"),
    (["--threads", "0"], "--threads"),
    (["--acceptance", "exact"], "--acceptance"),
    (["--max-draft-tokens", "8"], "--max-draft-tokens"),
]


def ids(rows: list[tuple[list[str], str]]) -> list[str]:
    return [" ".join(part if len(part) < 20 else "long" for part in args) for args, _ in rows]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return made.write(tmp_path / "tiny.octavo")


@pytest.mark.parametrize(("args", "where"), GENERATE + MEMORY, ids=ids(GENERATE + MEMORY))
def test_generate(commands: Commands, engine: Path, args: list[str], where: str) -> None:
    says = "--kv-blocks and --kv-memory" if len(args) == 4 and args[0] == "--kv-blocks" else ""
    parts = commands.refuses("generate", engine, "hi", *args, says=says or where)
    assert "_" not in parts["what"] + parts["todo"] or "target" in args[0]  # no name as Python has it


@pytest.mark.parametrize(
    ("args", "where"),
    [
        ([], "SOURCE"),
        (["m", "--all-transformers"], "--all-transformers"),
        (["m", "--markdown", "f"], "--markdown"),
    ],
)
def test_explain(commands: Commands, args: list[str], where: str) -> None:
    commands.refuses("explain", *args, where=where)


@pytest.mark.parametrize(("args", "where"), MEMORY, ids=ids(MEMORY))
def test_inspect_memory(commands: Commands, engine: Path, args: list[str], where: str) -> None:
    commands.refuses("inspect", engine, "--memory", *args, says=where)


@pytest.mark.parametrize(("args", "where"), BENCH + MEMORY, ids=ids(BENCH + MEMORY))
def test_bench(commands: Commands, engine: Path, args: list[str], where: str) -> None:
    commands.refuses("bench", engine, *args, says=where)


VOCABULARY = {"a": 0, "b": 1, "c": 2}


class Fake:
    """What runtime.load gives here: an engine without a model, and a tokenizer of three words."""

    def __init__(self, *_: object, **__: object) -> None:
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="c"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        self.engine = fake_engine()
        self.engine.tokenizer = Tokenizer(model.to_str())

    def __enter__(self) -> runtime.Engine:
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.close()


PROMPTS = {
    "empty": ("", [], "no tokens"),
    "of spaces": (" \n\t", [], "no tokens"),
    "longer than the context": ("a " * 5000, [], "5000 tokens; the context holds"),
    "not Unicode": ("a \udcff", [], "not valid Unicode"),
    "a chat without a template": ("a", ["--chat"], "no chat template"),
}


@pytest.mark.parametrize(("prompt", "args", "says"), PROMPTS.values(), ids=list(PROMPTS))
def test_a_prompt(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, prompt: str, args: list[str], says: str
) -> None:
    monkeypatch.setattr(runtime, "load", Fake)
    commands.refuses("generate", "any.octavo", prompt, *args, says=says)
    commands.refuses("generate", "any.octavo", "-", *args, says=says, stdin=prompt)


def test_a_token_that_is_none() -> None:
    """The command line takes texts alone."""
    with fake_engine() as engine:
        for prompt in ([-1], [3, 10**6], [2**70], [1.5], [True], ["a"]):
            with pytest.raises(runtime.RequestError, match="token [01] is") as error:
                engine.submit(prompt)  # type: ignore[arg-type]
            assert error.value.todo


def test_an_errors_parts_are_what_stdout_has(commands: Commands, engine: Path) -> None:
    code, out, err = commands.run("generate", engine, "hi", "--top-p", "2", "--json")
    what, todo = "it cannot be 2.0", "Use a number from 1e-09 to 1"
    parts = {"kind": "RequestError", "what": what, "where": "--top-p", "todo": todo}
    assert code == 2 and json.loads(out) == {"error": parts}
    assert err == f"octavo: --top-p: {what}. {todo}.\n"
