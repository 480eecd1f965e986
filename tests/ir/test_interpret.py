"""The interpreter: binding of sizes, checks of inputs and results, and what its errors show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.interpret import InterpretError, bind_dims, empty_kv, interpret
from ir.text import parse
from ir.types import KV, DType, Stream

STATE = KV((Stream("k", DType.F32, 1, 2), Stream("v", DType.BF16, 1, 2)), 1, 4)


def run(
    signature: str, *ops: str, result: str = "", weights: Any = (), wide: bool = False, **inputs: Any
) -> Any:
    body = "\n".join(f"  {op}" for op in ops)
    graph = parse(f"graph @g({signature}) {{\n{body}\n  return {result}\n}}")
    return interpret(graph, inputs, dict(weights), np.float64 if wide else np.float32)


def test_sizes_are_bound_by_shapes() -> None:
    found = run(
        "%a: f32[T], %b: f32[2*R + 1], %c: f32[T + R,3]", "%n = dim {size=T*R} : i32[]", result="%n",
        a=np.zeros(4), b=np.zeros(7), c=np.zeros((7, 3)),
    )  # fmt: skip
    assert found.dims == {"T": 4, "R": 3} and int(found.outputs[0]) == 12


@pytest.mark.parametrize(
    ("signature", "shapes", "message"),
    [
        ("%a: f32[T], %b: f32[T]", [(2,), (3,)], r"input %b has shape \[3\], not \[T\] with {'T': 2}"),
        ("%a: f32[2]", [(3,)], r"input %a has shape \[3\], not \[2\]"),
        ("%a: f32[2]", [(2, 1)], r"input %a has shape \[2, 1\], not \[2\]"),
        ("%a: f32[2*T]", [(3,)], "no input's shape tells the size T"),
        ("%a: f32[T*R]", [(3,)], "no input's shape tells the size"),
        ("%a: f32[T], %b: f32[T + 1]", [(2,), (2,)], r"input %b has shape \[2\], not \[T \+ 1\]"),
        ("%a: f32[T]) dims {T: 3..4", [(2,)], r"T=2 is outside 3\.\.4"),
        ("%a: f32[T]) dims {T: 3..", [(2,)], r"T=2 is outside 3\.\."),
    ],
)
def test_shapes_that_disagree(signature: str, shapes: list[tuple[int, ...]], message: str) -> None:
    closing = "}" if "dims" in signature else ")"
    graph = parse(f"graph @g({signature}{closing} {{ return }}")
    with pytest.raises(InterpretError, match=message):
        bind_dims(graph, dict(zip("ab", map(np.zeros, shapes), strict=False)))


def test_a_missing_input_and_a_missing_weight_are_named() -> None:
    with pytest.raises(InterpretError, match="graph @g needs input %x"):
        run("%x: f32[1]")
    with pytest.raises(KeyError, match="w"):
        run("%x: f32[1]", "%y = add %x, @w: f32[1] : f32[1]", x=[1])


def test_an_op_that_fails_is_shown() -> None:
    with pytest.raises(
        InterpretError, match=r"indices 5\.\.5 leave an axis of 2 in\n  %y = embed %i.* // model.embed"
    ):
        run(
            "%i: i32[1]",
            "%y = embed %i, @w: f32[2,1] : f32[1,1] // model.embed",
            i=[5],
            weights={"w": np.zeros((2, 1))},
        )


def test_a_size_that_no_input_tells_is_an_error_of_the_op() -> None:
    with pytest.raises(InterpretError, match=r"no input's shape tells the size T in\n  %y = iota"):
        run("", "%y = iota {size=T} : i32[T]")


def test_a_result_of_another_shape_than_inferred_is_an_error() -> None:
    with pytest.raises(InterpretError, match=r"the result has shape \[2\], not \[3\] in\n  %y = slice"):
        run("%x: f32[T]", "%y = slice %x {axis=0, start=0, stop=3} : f32[3]", x=np.zeros(2))


def test_a_state_must_fit_its_type() -> None:
    signature = "%kv: kv[full: k f32[1,2], v bf16[1,2]; block 4; layers 1]"
    good = empty_kv(STATE, 5)
    out = run(signature, result="%kv", kv=good, wide=True).outputs[0]
    assert out["k"].dtype == np.float64 and out["v"].dtype == DType.BF16.numpy and np.isnan(out["k"]).all()
    for bad in ({"k": good["k"]}, {"k": good["k"], "v": good["v"][:, :, :2]}, np.zeros(3)):
        with pytest.raises(InterpretError, match="input %kv is no state of"):
            run(signature, kv=bad)


def test_weights_may_be_a_function_and_have_their_graphs_type() -> None:
    graph = parse("graph @g(%x: f32[1]) {\n  %y = mul %x, @w: f32[1] : f32[1]\n  return %y\n}")
    out = interpret(graph, {"x": [3]}, lambda name: np.array([2], np.float64), np.float32).outputs[0]
    assert out.dtype == np.float32 and out.tolist() == [6]


def test_every_value_can_be_looked_at() -> None:
    ops = ("%y = add %x, 1 : f32[2]", "%z = mul %y, 2.0 : f32[2]")
    found = run("%x: f32[2]", *ops, result="%z", x=[1, 2])
    assert {n: v.tolist() for n, v in found.values.items()} == {"x": [1, 2], "y": [2, 3], "z": [4, 6]}
