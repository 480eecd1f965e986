"""quantize_activations: inputs of linears of codes are rounded per token, once for all that read them."""

from __future__ import annotations

from functools import partial

import pytest

from ir.text.printer import print_graph
from passes.cse import Cse
from passes.dce import Dce
from passes.quantize_activations import QuantizeActivations
from tests.passes.checks import graph_text, read

HEAD = "graph @g(%x: f32[T,64]) dims {T: 1..64} {"
body = partial(graph_text, HEAD)
W = "%w = dequantize @q: {}[8,64], @s: f16[8,2] {{group_size=32}} : f32[8,64]"
TWO = [
    "%y = linear %x, %w : f32[T,8]",
    "%v = linear %x, %w, @b: f32[8] : f32[T,8]",
    "%z = add %y, %v : f32[T,8]",
]
LINEAR = "%z = linear %x, %w : f32[T,8]"


def after(step: QuantizeActivations, *lines: str) -> list[str]:
    graph = Dce().run(Cse().run(step.run(read(body(*lines))).graph).graph).graph
    return [line.strip() for line in print_graph(read(print_graph(graph))).splitlines()[1:-2]]


def test_the_input_goes_through_codes() -> None:
    assert after(QuantizeActivations("i8", 16), W.format("u4"), LINEAR)[1:] == [
        '%v1, %v2 = quantize %x {dtype="i8", group_size=16} : i8[T,64], f32[T,4]',
        '%v3 = dequantize %v1, %v2 {group_size=16, dtype="f32"} : f32[T,64]',
        "%z = linear %v3, %w : f32[T,8]",
    ]


def test_two_linears_share_it() -> None:
    other = [
        "%y = linear %x, %w : f32[T,8]",
        "%v = linear %x, %w, @b: f32[8] : f32[T,8]",
        "%z = add %y, %v : f32[T,8]",
    ]
    found = after(QuantizeActivations("i8"), W.format("i8"), *other)
    assert (
        sum("= quantize" in line for line in found) == 1
        and sum("= dequantize" in line for line in found) == 2
    )


@pytest.mark.parametrize(
    ("dtype", "codes", "linear"),
    [
        ("none", "u4", LINEAR),
        ("i8", "f8e4m3", LINEAR),
        ("f8e4m3", "u4", LINEAR),
        ("i8", "u4", "%z = linear %x, @w: f32[8,64] : f32[T,8]"),
        ("i8", "u4", "%z = linear @c: f32[3,64], %w : f32[3,8]"),
    ],
)
def test_others_are_left_alone(dtype: str, codes: str, linear: str) -> None:
    lines = [W.format(codes), linear]
    found = after(QuantizeActivations(dtype), *lines)
    assert not any("= quantize" in line for line in found)


def test_refuses_what_there_is_not() -> None:
    with pytest.raises(ValueError, match="quantize_activations: dtype"):
        QuantizeActivations("i4")
    with pytest.raises(ValueError, match="negative"):
        QuantizeActivations("i8", -1)
