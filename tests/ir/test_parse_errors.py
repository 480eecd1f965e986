"""What is not a graph is refused with line and column, whatever it is; nothing in a text is ever run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.text import ParseError, parse
from ir.verify import VerifyError, verify

TEXT = (Path(__file__).parent.parent / "data" / "ir" / "every_construct.ir").read_text()
TOKENS = sorted(set(re.findall(r"[%@]?[\w.]+|//|[^\w\s]", TEXT)) | {"-", "~", "&", "//", '"', "\n", "1e999"})


def graph_with(attribute: str) -> str:
    return f"graph @g() {{\n  %x = f {{a={attribute}}} : f32[]\n  return\n}}"


def test_every_truncated_text_is_refused() -> None:
    end = len(TEXT.rstrip())
    for stop in range(end):
        with pytest.raises(ParseError, match=r"^line \d+, column \d+: "):
            parse(TEXT[:stop])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 8), st.sampled_from(TOKENS) | st.text(max_size=3))
def test_a_damaged_text_gives_a_graph_or_an_error_of_ours(at: int, cut: int, put: str) -> None:
    try:
        verify(parse(TEXT[:at] + put + TEXT[at + cut :]))
    except (ParseError, VerifyError):
        pass


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join))
def test_any_tokens_as_an_attribute_give_a_graph_or_an_error_of_ours(attribute: str) -> None:
    try:
        verify(parse(graph_with(attribute)))
    except (ParseError, VerifyError):
        pass


@pytest.mark.parametrize(
    ("attribute", "column", "message"),
    [
        ("mod(1,0)", 13, "the divisor 0 is not positive"),
        ("mod(T,0)", 13, "the divisor 0 is not positive"),
        ("1//0", 13, "the divisor 0 is not positive"),
        ("T//(2-2)", 13, "the divisor 0 is not positive"),
        ("ceildiv(T,-1)", 13, "the divisor -1 is not positive"),
        ("mod(T)", 13, "mod takes 2 arguments, not 1"),
        ("min()", 13, "min takes 2 or more arguments, not 0"),
        ("max(T)", 13, "max takes 2 or more arguments, not 1"),
        ("Table(0,q)", 13, "Table takes 3 arguments, not 2"),
        ("Table(q,q,k)", 13, "Table's first argument is the number of a table, not q"),
        ("(k <= q) + 1", 13, "k <= q is a condition where a number is needed"),
        ("k & q", 13, "k is a number where a condition is needed"),
        ("~k", 13, "k is a number where a condition is needed"),
        ("-(k <= q)", 13, "k <= q is a condition where a number is needed"),
        ("Table(0,q,k) * 2", 13, r"Table\(0, q, k\) is a condition where a number is needed"),
        ("99999999999999999999", 13, "the integer is larger than 64 bits hold"),
        ("9" * 5000, 13, "the integer is larger than 64 bits hold"),
        ('"\\q"', 13, "malformed string"),
        ("1, a=2", 16, "a is given twice"),
        ("", 13, "expected a name, found '}'"),
        ("1 2", 15, "expected ',', found '2'"),
        ("[1", 15, "expected ',', found '}'"),
        ("T[0]", 14, r"expected ',', found '\['"),
        ("$", 13, r"unexpected character '\$'"),
        ('"a', 13, "unexpected character '\"'"),
    ],
)
def test_bad_attributes(attribute: str, column: int, message: str) -> None:
    with pytest.raises(ParseError, match=f"^line 2, column {column}: {message}"):
        parse(graph_with(attribute))


@pytest.mark.parametrize("opening", ["(", "[", "~", "-", "mod(1,", "~(", "-(", "min(2,Table(0,q,"])
def test_deep_nesting_is_refused(opening: str) -> None:
    with pytest.raises(ParseError, match="line 2, column .*nested deeper than"):
        parse(graph_with(opening * 5000))


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "line 1, column 1", "expected 'graph'"),
        ("graph @g(%x: f31[]) { return }", "line 1, column 14", "there is no element type 'f31'"),
        (
            "graph @g(%x: kv[full: k f3[1,2]; block 16; layers 1]) { return }",
            "column 25",
            "no element type 'f3'",
        ),
        ("graph @g(%x: kv[full: k f32[1,2,3]; block 16; layers 1]) { return }", "column 32", "expected ']'"),
        (
            "graph @g(%x: kv[half: k f32[1,2]; block 16; layers 1]) { return }",
            "column 17",
            "expected 'window'",
        ),
        ("graph @g(%x: f32[], %x: f32[]) { return }", "column 21", "%x is defined twice"),
        ("graph @g(%x: f32[-1]) { return }", "column 18", "-1 is not a size"),
        ("graph @g(%x: f32[T==1]) { return }", "column 18", "is a condition where a number is needed"),
        ("graph @g() dims {T: 1..2, T: 1..2} { return }", "column 27", "T is given twice"),
        ("graph @g() dims { return }", "column 26", "expected ':'"),
        ("graph @g() { return %y }", "column 21", "%y is not defined before this line"),
        ("graph @g() { return } x", "column 23", "expected the text's end, found 'x'"),
        (
            "graph @g() {\n  %x = f : f32[]\n  %x = f : f32[]\n  return\n}",
            "line 3, column 3",
            "%x is defined twice",
        ),
        ("graph @g() {\n  %x = f %y : f32[]\n  return\n}", "line 2, column 10", "%y is not defined"),
        ("graph @g() {\n  %x, %y = f : f32[]\n  return\n}", "line 2, column 3", "2 results but 1 types"),
        ("graph @g() {\n  %x = f T + 1 : f32[]\n  return\n}", "line 2, column 10", "'T' is not an operand"),
        ('graph @g() {\n  %x = f "a" : f32[]\n  return\n}', "line 2, column 10", "is not an operand"),
        ('graph @g() {\n  %x = f : f32[] // a"b\n  return\n}', "line 2, column 18", "malformed string"),
        ("graph @g() {\n  %x = f : f32[]\n}", "line 3, column 1", "expected a %value, found '}'"),
        ("graph @g() {\r\n\t§", "line 2, column 2", "unexpected character '§'"),
    ],
)
def test_bad_graphs(text: str, place: str, message: str) -> None:
    with pytest.raises(ParseError) as found:
        parse(text)
    assert place in str(found.value) and message in str(found.value)


def test_names_are_only_names() -> None:
    """sympify and eval would import, call or subscript here."""
    for text in ("__import__(os)", "T.__class__", "exec(1)", "lambda(1)", '__import__("os")', "T.n", "E**2"):
        with pytest.raises(ParseError):
            parse(graph_with(text))
    names = parse(graph_with("__import__ + S + E + I + pi")).ops[0].attrs["a"].free_symbols
    assert {s.name for s in names} == {"__import__", "S", "E", "I", "pi"}
