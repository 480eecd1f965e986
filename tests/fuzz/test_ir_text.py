"""What the IR's text must not do: take minutes, print what does not read back, or fill the screen."""

from __future__ import annotations

import time

import pytest

from ir.text import ParseError, parse, print_graph
from ir.verify import VerifyError, verify

NAMES = [f"S{i}" for i in range(300)]
DIMS = ", ".join(f"{n}: 1..9" for n in NAMES)


def of_size(size: str) -> str:
    return f"graph @g(%x: f32[{size}]) dims {{{DIMS}}} {{\n  return %x\n}}\n"


def of_mask(mask: str) -> str:
    return (
        f"graph @g(%x: f32[S0]) dims {{S0: 1..9}} {{\n  %y = neg %x {{m={mask}}} : f32[S0]\n  return %x\n}}\n"
    )


@pytest.mark.parametrize(
    "size",
    [
        "*".join(f"({n}+1)" for n in NAMES[:20]),  # a million terms
        "+".join(NAMES + NAMES),
        f"mod({'+'.join(f'{i + 3}*{n}' for i, n in enumerate(NAMES[:60]))}, 7)",  # half a minute in sympy
        f"max({', '.join(NAMES[:32])})",
        f"min(({'+'.join(NAMES[:32])}), 4)",
        "*".join(["(S0+S1+S2)"] * 40),
    ],
)
def test_what_takes_long_to_multiply_out_is_refused(size: str) -> None:
    before = time.process_time()
    with pytest.raises(ParseError, match="line 1, column"):
        parse(of_size(size))
    assert time.process_time() - before < 5


@pytest.mark.parametrize("mask", ["*".join(["(k+q)"] * 60) + " <= 1", "~" * 3000 + "(k<=q)"])
def test_so_is_a_mask(mask: str) -> None:
    with pytest.raises(ParseError):
        parse(of_mask(mask))


def test_numbers_that_grow_beyond_64_bits_are_refused() -> None:
    """They would be printed, and not read back."""
    for size in ("4611686018427387904*4*S0", "9223372036854775807*S0 + 9223372036854775807*S0"):
        with pytest.raises(ParseError, match="64 bits"):
            parse(of_size(size))
    with pytest.raises(ParseError, match="64 bits|not a size"):
        parse(of_size("4611686018427387904*4"))
    with pytest.raises(ParseError, match="integer is larger"):
        parse(of_size("9" * 5000))


def test_what_real_graphs_have_is_far_below_the_limits() -> None:
    for size in (
        "(S0+1)*(S1+2)*(S2+3)*(S3+4)",
        "ceildiv(S0*S1 + 15, 16)*16",
        "min(S0, S1, S2 + 7)",
        "*".join(NAMES[:40]),
    ):
        graph = parse(of_size(size))
        assert parse(print_graph(graph)) == graph
    wide = " & ".join(f"((k <= {i}) | (q > {i}))" for i in range(60))
    graph = parse(of_mask(wide))
    assert parse(print_graph(graph)) == graph


def test_what_is_multiplied_out_fits_the_limits_too() -> None:
    factors = "*".join(NAMES[:40])
    with pytest.raises(ParseError, match="multiplied out it has more than"):
        parse(of_size(f"({' + '.join(NAMES[40:50])})*{factors}"))


def test_messages_stay_short() -> None:
    for text in (f"graph @g() {{ {'9' * 10_000}", f"graph @g() {{\n  return %{'x' * 10_000}\n}}"):
        with pytest.raises(ParseError) as caught:
            parse(text)
        assert len(str(caught.value)) < 400
    long = f"graph @g(%x: f32[4]) {{\n  %y = neg %x : f32[5] // {'y' * 100_000}\n  return %y\n}}\n"
    with pytest.raises(VerifyError) as refused:
        verify(parse(long))
    assert len(str(refused.value)) < 10_000
