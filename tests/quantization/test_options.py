"""Options of quantisation: their defaults, the rules for modules, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler import arguments
from compiler.errors import CompileError
from compiler.options import Options, check_options
from compiler.quantization.draft import check_draft, draft_quantization
from compiler.quantization.options import Quantization, check_quantization, matches


def test_defaults() -> None:
    for weights, algorithm, activations in (
        ("int4", "gptq", "int8"), ("int8", "gptq", "int8"), ("auto", "gptq", "int8"), ("fp8", "rtn", "none"),
        ("none", "rtn", "none"), ("own", "rtn", "int8"),
    ):  # fmt: skip
        found = Quantization(weights).resolved(["cpu"])
        assert (found.algorithm, found.activations) == (algorithm, activations)
    assert Quantization("int4").resolved(["gpu"]).activations == "none"
    assert Quantization("int4", activations="none").resolved(["cpu"]).activations == "none"
    assert not Quantization().resolved(["cpu", "gpu"]).any


@pytest.mark.parametrize(
    ("format", "group", "bits"),
    [("int4", None, 4.5), ("int4", 128, 4.125), ("int8", None, 8.5), ("int8", 0, 8.25), ("fp8", None, 8.5)],
)
def test_grids_have_the_bits_that_they_say(format: str, group: int | None, bits: float) -> None:
    """64 inputs; a scale of a whole row has 32 bits, of a group 16."""
    inputs = 128 if format != "fp8" else 64
    assert Quantization(format, group).grid(format).bits_per_weight(inputs) == bits


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp", False),
        ("model.layers.*.mlp", "model.layers.10.mlp.up_proj", True),
        ("*.q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.q_proj", False),
    ],
)
def test_patterns(pattern: str, path: str, found: bool) -> None:
    assert matches(pattern, path) is found


def test_the_first_rule_that_matches_decides() -> None:
    asked = Quantization("int4", keep=("a.b=int8", "a", "c=fp8"))
    formats = [asked.format_of([path]) for path in ("a.b", "a.x", "c", "d")]
    assert formats == ["int8", "none", "fp8", "int4"]
    assert Quantization("int4").format_of(["lm_head"]) == "int4"
    tied = ["lm_head", "model.embed_tokens"]
    assert Quantization("int4", keep=("lm_head=int8",)).format_of(tied) == "int8"


def test_a_grid_of_its_own_is_left_but_for_what_rules_name() -> None:
    """Codes stay; what is float stays too, where no rule asks for a format."""
    asked = Quantization("own", keep=("a=int8",))
    assert [asked.format_of([path]) for path in ("a", "b", "h")] == ["int8", "none", "none"]
    assert Quantization("own").any and not Quantization("own", activations="none").changes
    assert Quantization("own").resolved(["cpu"]).changes and Quantization("own", kv="int8").changes
    assert Quantization("int8").changes and not Quantization().changes


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (dict(weights="int3"), "--quantize int3"),
        (dict(weights="int4", group=16), "--group 16"),
        (dict(weights="int4", group=0), "--group 0"),
        (dict(group=32), "--group 32"),
        (dict(weights="fp8", group=32), "--group 32"),
        (dict(weights="int4", algorithm="best"), "--algorithm best"),
        (dict(weights="own", algorithm="gptq"), "--algorithm gptq"),
        (dict(weights="own", group=32), "--group 32"),
        (dict(weights="fp8", algorithm="gptq"), "--algorithm gptq"),
        (dict(weights="int4", algorithm="rtn", calibration=Path("a.txt")), "--calibration a.txt"),
        (dict(kv="int4", calibration=Path("a.txt")), "--calibration a.txt"),
        (dict(weights="int4", calibration=Path("/none.txt")), "--calibration /none.txt"),
        (dict(weights="int8", symmetric=False), "--asymmetric"),
        (dict(weights="int4", activations="int4"), "--activations int4"),
        (dict(kv="int3"), "--kv int3"),
        (dict(weights="int4", keep=("",)), "--keep "),
        (dict(weights="int4", keep=("a=int5",)), "--keep a=int5"),
        (dict(keep=("a",)), "--keep"),
        (dict(algorithm="rtn"), "--algorithm rtn"),
        (dict(activations="int8"), "--activations int8"),
        (dict(weights="fp8", activations="int8-token"), "--activations int8-token"),
        (dict(weights="int4", activations="fp8"), "--activations fp8"),
        (dict(kv="bf16", max_kl=0.1), "--max-kl 0.1"),
        (dict(weights="int4", calibration=Path("a\0b")), "--calibration a\0b"),
        (dict(weights="int4", calibration=Path("/")), "--calibration /"),
        (dict(weights="int4", max_kl=-1.0), "--max-kl -1.0"),
        (dict(weights="int4", max_kl=float("nan")), "--max-kl nan"),
        (dict(weights="int4", max_kl=float("inf")), "--max-kl inf"),
    ],
)
def test_what_no_compile_has_is_refused(given: dict[str, Any], where: str) -> None:
    with pytest.raises(CompileError) as refused:
        check_quantization(Quantization(**given))
    assert refused.value.where == where and refused.value.todo


@pytest.mark.parametrize(
    "given",
    [
        dict(weights="fp8", activations="fp8"),
        dict(weights="int4", keep=("lm_head=fp8",), activations="fp8"),
        dict(weights="fp8", keep=("a=int8",), activations="int8"),
        dict(weights="own", activations="fp8"),
        dict(kv="int8", max_kl=0.0),
        dict(activations="none"),
    ],
)
def test_what_does_something_is_not_refused(given: dict[str, Any]) -> None:
    check_quantization(Quantization(**given))


@pytest.mark.parametrize(("kv", "block", "fits"), [("int4", 8, False), ("int2", 8, False), ("int8", 8, True),
                                                   ("int4", 16, True), (None, 8, True)])  # fmt: skip
def test_blocks_hold_whole_strips_of_codes(kv: str | None, block: int, fits: bool) -> None:
    asked = Options(block=block, quantization=Quantization(kv=kv))
    with nullcontext() if fits else pytest.raises(CompileError, match="--block 8: codes of"):
        check_options(asked)


@pytest.mark.parametrize(
    ("name", "value"),
    [("group", "32"), ("quantize", None), ("keep", 3), ("max_kl", "0.1"), ("max_kl", True),
     ("calibration", 3), ("symmetric", 1), ("kv", 8), ("algorithm", ["rtn"])],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(CompileError, match=name):
        arguments.check(**{name: value})


def test_patterns_may_come_as_one_text() -> None:
    found = arguments.quantization("int4", None, None, True, "a,b.*=int8", None, None, "text.txt", None)
    assert found.keep == ("a", "b.*=int8") and found.calibration == Path("text.txt")
    assert arguments.quantization("none", None, None, True, "", None, None, None, None).keep == ()


@pytest.mark.parametrize(
    ("draft", "given", "devices", "said"),
    [
        ("self:int8", {}, ("cpu",), "There is self:int4"),
        ("self:int4", {}, ("gpu",), "only the target cpu has a draft"),
        ("self:int4", dict(weights="int4"), ("cpu",), "it is int4 already"),
        ("self:int4", dict(weights="auto"), ("cpu", "gpu"), "it is int4 already"),
        ("self:int4", dict(algorithm="best"), ("cpu",), "--algorithm best"),
        ("self:int4", dict(algorithm="rtn", calibration=Path("a.txt")), ("cpu",), "nothing is fitted"),
    ],
)
def test_no_such_draft(draft: str, given: dict[str, Any], devices: tuple[str, ...], said: str) -> None:
    with pytest.raises(CompileError, match=said):
        check_draft(draft, Quantization(**given), devices)


@pytest.mark.parametrize("weights", ["none", "int8", "fp8", "own"])
def test_algorithm_and_text_are_the_drafts_where_the_model_has_no_use_for_them(weights: str) -> None:
    text = Path(__file__)
    asked = Quantization(weights, algorithm="awq", calibration=text, kv="int8")
    check_options(Options(quantization=asked, draft="self:int4"))
    check_draft("self:int4", asked, ("cpu",))
    found = draft_quantization(asked)
    wanted = Quantization("int4", None, "awq", activations="int8", kv="int8", calibration=text)
    assert found == replace(wanted, symmetric=False)
    assert draft_quantization(Quantization()).algorithm == "gptq"
    if weights != "int8":
        with pytest.raises(CompileError):
            check_options(Options(quantization=replace(asked, kv=None)))
