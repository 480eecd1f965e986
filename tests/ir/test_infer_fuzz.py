"""Whatever operands and attributes an op is given, inference gives types or an InferError, nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.build import infer
from ir.dims import symbol
from ir.graph import Graph, Op, Scalar, Value, Weight
from ir.interpret import InterpretError, empty_kv, interpret
from ir.ops import OPS, InferError
from ir.predicates import CAUSAL
from ir.text import parse, print_graph
from ir.types import KV, DType, Stream, Tensor, Type
from ir.verify import VerifyError, verify
from tests.ir.strategies import SYMBOLS, attributes, odd_text

S = symbol("S")
STATE = KV((Stream("k", DType.F32, 2, 4), Stream("v", DType.F32, 2, 4)), 2, 4)
LIKELY_SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, S, S + 1, 2 * S])
tensors = st.builds(
    Tensor,
    st.sampled_from([DType.F32, DType.F32, DType.F32, DType.I32, DType.BOOL, DType.BF16]),
    st.lists(LIKELY_SIZES, max_size=4).map(tuple),
)
states = st.just(STATE) | st.builds(KV, st.just(()), st.just(1))
operands = st.one_of(
    tensors,
    tensors,
    tensors,
    states,
    st.none(),
    st.builds(Scalar, st.sampled_from([True, 0, 1, -3, 0.5, 1e300])),
)
LIKELY_ATTRS: dict[str, st.SearchStrategy[Any]] = {
    "axis": st.integers(-1, 4),
    "axes": st.lists(st.integers(-1, 3), max_size=3).map(tuple),
    "perm": st.permutations([0, 1, 2]).map(tuple) | st.just((1, 0)),
    "shape": st.lists(LIKELY_SIZES, max_size=4).map(tuple),
    "sizes": st.lists(LIKELY_SIZES, max_size=3).map(tuple),
    "size": LIKELY_SIZES,
    "dtype": st.sampled_from([*DType]) | odd_text,
    "mask": st.sampled_from([CAUSAL, True]),
    "scale": st.just(1.0),
    "layer": st.integers(-1, 3),
    "rank": st.integers(0, 5),
    "eps": st.just(1e-5),
    "activation": st.sampled_from(["none", "silu", "what"]),
    "gated": st.booleans(),
    "groups": st.integers(0, 3),
    "k": st.integers(0, 4),
    "num_experts": st.integers(0, 3),
    "padding": st.integers(0, 3),
    "offset": st.integers(-1, 3),
    "start": LIKELY_SIZES,
    "stop": LIKELY_SIZES,
    "step": st.integers(0, 3),
    "low": st.floats(-1, 1) | st.integers(-300, 300),
    "value": st.floats(allow_nan=False) | st.integers(-300, 300) | st.booleans(),
}


@st.composite
def calls(draw: st.DrawFn, kind: str) -> tuple[str, list[Any], dict[str, Any]]:
    """An op with operands and attributes that are often nearly right and sometimes absurd."""
    op = OPS[kind]
    most = len(op.operands) + (2 if op.variadic else 0)
    wild = draw(st.integers(0, 9)) == 0
    count = draw(st.integers(0, most + 1)) if wild else draw(st.integers(op.num_required, most))
    types = draw(st.lists(operands if wild else tensors, min_size=count, max_size=count))
    same = draw(st.booleans())
    if same and types:
        types = [types[0] if isinstance(t, Tensor) else t for t in types]
    if "kv" in op.operands and not wild and "kv" in op.operands[:count]:
        types[op.operands.index("kv")] = STATE
    names = [n for n, default in op.attrs.items() if draw(st.booleans()) or repr(default) == "required"]
    absurd = draw(st.integers(0, 4)) == 0
    attrs = {n: draw(attributes if absurd or n not in LIKELY_ATTRS else LIKELY_ATTRS[n]) for n in names}
    return kind, types, attrs


def as_op(kind: str, types: list[Any], attrs: dict[str, Any]) -> tuple[Op, tuple[Value, ...]]:
    """The op without results, and its operands that are values."""
    args = [
        Value(f"x{i}", t) if isinstance(t, Tensor | KV) else t if isinstance(t, Scalar) else None
        for i, t in enumerate(types)
    ]
    return Op(kind, tuple(args), attrs, ()), tuple(a for a in args if isinstance(a, Value))


@pytest.mark.parametrize("kind", OPS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_only_infer_errors(kind: str, data: st.DataObject) -> None:
    call = data.draw(calls(kind))
    op, values = as_op(*call)
    try:
        types = infer(op.kind, op.args, op.attrs, "model.x")
    except InferError as e:
        assert str(e).startswith(f"{kind}: ") and str(e).endswith("(at model.x)")
        types = None
    outs = tuple(Value(f"y{i}", t) for i, t in enumerate(types or (Tensor(DType.F32, ()),)))
    graph = Graph(
        "g", dict.fromkeys(SYMBOLS, (1, None)), values, (Op(op.kind, op.args, op.attrs, outs),), outs
    )
    check(graph, valid=types is not None)


def check(graph: Graph, valid: bool) -> None:
    """Its text is the same graph; it verifies if and only if inference accepts it; and what verifies runs."""
    again = parse(print_graph(graph))
    assert again == graph
    if valid:
        verify(again)
        run(graph)
        return
    with pytest.raises(VerifyError):
        verify(again)


def run(graph: Graph) -> None:
    """References agree with inference about types and shapes; they may fail only on values."""
    rng = np.random.default_rng(0)
    given = {v.name: array_of(v.type, rng) for v in graph.inputs}
    try:
        outputs = interpret(graph, given, {}).outputs
    except InterpretError as e:
        sliced = graph.ops[0].kind == "slice" and "the result has shape" in str(e)  # S was too small for it
        assert sliced or any(s in str(e) for s in VALUE_ERRORS), str(e)
        return
    for value, out in zip(graph.outputs, outputs, strict=True):
        if isinstance(value.type, Tensor):
            assert out.dtype == value.type.dtype.numpy


VALUE_ERRORS = ("leave an axis", "leave a cache", "zero-size array", "tells the size", "tokens in the step")


def array_of(type: Type, rng: Any) -> Any:
    if isinstance(type, KV):
        return empty_kv(type, 3)
    shape = [d if isinstance(d, int) else int(d.subs(S, 2)) for d in type.shape]
    return (
        (rng.random(shape) < 0.5)
        if type.dtype is DType.BOOL
        else rng.integers(0, 2, shape).astype(type.dtype.numpy)
    )


def test_an_unknown_kind_is_an_infer_error() -> None:
    with pytest.raises(InferError, match=r"there is no op 'x' \(at a.b\)"):
        infer("x", (), {}, "a.b")


def test_what_is_no_operand_is_an_infer_error() -> None:
    with pytest.raises(InferError, match=r"neg: 1.0 is not an operand \(at a.b\)"):
        infer("neg", (1.0,), {}, "a.b")  # type: ignore[arg-type]


def test_the_table_is_whole() -> None:
    """Names are unique, `?` and `*` operands come last, and the traits are on the ops that have them."""
    for kind, op in OPS.items():
        assert op.kind == kind
        optional = [name[-1] in "?*" for name in op.operands]
        assert optional == sorted(optional) and all(not n.endswith("*") for n in op.operands[:-1])
        assert (op.rollback is not None) == (kind in ("kv_write", "kv_seal", "paged_recurrence"))
    assert {k for k, op in OPS.items() if op.sequence_aware} == {
        "attention",
        "kv_seal",
        "kv_write",
        "paged_attention",
        "paged_recurrence",
        "recurrence",
        "take_rows",
    }
    assert isinstance(Weight("w", STATE).type, KV)
