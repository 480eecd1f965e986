"""Pointwise groups under Triton's interpreter: every op on every type that it takes, at odd numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from codegen import triton
from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Scalar, Value, tensor_of
from ir.types import DType
from tests.codegen.harness import Array, Chunk, arg, lower, paged_builder, reference_step, weight
from tests.triton.harness import TritonModel

T = symbol("T")
VOCAB = 24
NAN, INF = float("nan"), float("inf")
NUMBERS = (
    [0.0, -0.0, 1e-30, 1e-6, -1e-6, 1e-3, -1e-3, 0.3, -0.3, 0.54, 0.56, -0.54, -0.56]
    + [1.0, -1.0, 1.5, -2.0, 3.0, -7.25, 12.0, -12.0, 30.0, -30.0, 80.0, -80.0]
)  # fmt: skip
POSITIVE = [1e-30, 1e-6, 1e-3, 0.5, 0.99, 1.0, 1.01, 2.0, 3.0, 7.25, 1000.0, 1e6, 1e30]
ANGLES = [
    0.0,
    0.1,
    -0.1,
    0.7853,
    0.7855,
    1.5707964,
    -3.1415927,
    100.0,
    4095.5,
    65537.0,
    131071.0,
    -131072.5,
    1e6,
]
WHOLE = [0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 6.0, 7.0, -7.0, 100.0, -100.0]
Case = Callable[[GraphBuilder], list[Value]]


def column(b: GraphBuilder, name: str, width: int, dtype: str = "f32") -> Value:
    x = b.op("embed", arg(b, "ids"), weight(name, VOCAB, width))
    return x if dtype == "f32" else b.op("cast", x, dtype=dtype)


def functions(b: GraphBuilder) -> list[Value]:
    x = column(b, "numbers", len(NUMBERS))
    kinds = ("exp", "tanh", "sigmoid", "erf", "relu", "silu", "gelu", "gelu_tanh", "softplus", "abs", "floor")
    return [b.op(kind, x) for kind in (*kinds, "neg")]


def functions_of_positive_numbers(b: GraphBuilder) -> list[Value]:
    x = column(b, "positive", len(POSITIVE))
    made = [b.op(kind, x) for kind in ("log", "sqrt", "rsqrt")]
    return made + [b.op("pow", x, Scalar(e)) for e in (-0.5, 0.5, 1.0, 0.0, 0.37, -1.1)]


def rotations(b: GraphBuilder) -> list[Value]:
    x = column(b, "angles", len(ANGLES))
    return [b.op("sin", x), b.op("cos", x)]


def powers(b: GraphBuilder) -> list[Value]:
    x = column(b, "whole", len(WHOLE))
    made = [b.op("pow", x, Scalar(e)) for e in (2.0, 3.0, 4.0, 5.0, 0.0)]
    return [*made, b.op("pow", Scalar(1.7), x), b.op("pow", b.op("abs", x), x)]


def quotients(b: GraphBuilder) -> list[Value]:
    made: list[Value] = []
    for dtype in ("f32", "i32", "i64"):
        x = column(b, "whole", len(WHOLE), dtype)
        for by in (3, -3, 7):
            divisor = Scalar(float(by) if dtype == "f32" else by)
            made += [b.op("floordiv", x, divisor), b.op("mod", x, divisor)]
    return made


def with_nan(b: GraphBuilder) -> list[Value]:
    x, y = column(b, "nan.x", 9), column(b, "nan.y", 9)
    made = [b.op(kind, x, y) for kind in ("maximum", "minimum", "add", "mul", "div")]
    made += [b.op("relu", x), b.op("clamp", x, low=-0.5, high=0.5), b.op("clamp", x, low=0.25)]
    tests = [b.op(kind, x, y) for kind in ("lt", "le", "gt", "ge", "eq", "ne")]
    return made + [b.op("where", test, x, Scalar(7.0)) for test in tests]


def integers(b: GraphBuilder) -> list[Value]:
    made: list[Value] = []
    for dtype in ("i32", "i64"):
        x, y = column(b, "whole", len(WHOLE), dtype), b.op("cast", arg(b, "pos"), dtype=dtype)
        y = b.op("reshape", y, shape=(T, 1))
        made += [b.op(kind, x, y) for kind in ("add", "sub", "mul", "maximum", "minimum")]
        made += [b.op("neg", x), b.op("abs", x), b.op("clamp", x, low=-3, high=5), b.op("pow", x, Scalar(2))]
        wide = b.op("mul", b.op("cast", x, dtype="i64"), Scalar(3_000_000_000))
        made.append(b.op("floordiv", wide, Scalar(1_000_000_000)))
    return made


def truth(b: GraphBuilder) -> list[Value]:
    x = column(b, "whole", len(WHOLE))
    y = b.op("slice", column(b, "numbers", len(NUMBERS)), axis=1, start=0, stop=len(WHOLE))
    p, q = b.op("gt", x, Scalar(0.0)), b.op("cast", y, dtype="bool")
    made = [
        b.op("and", p, q),
        b.op("or", p, q),
        b.op("not", p),
        b.op("eq", p, q),
        b.op("ne", p, Scalar(True)),
    ]
    made.append(b.op("where", p, q, Scalar(True)))
    small = [b.op("cast", b.op("cast", p, dtype=d), dtype="bool") for d in ("i8", "u8", "i64", "f32", "bf16")]
    return [b.op("cast", b.op("cast", m, dtype="i32"), dtype="bool") for m in [*made, *small]]


def narrow(b: GraphBuilder) -> list[Value]:
    """Each result is rounded, not only the last."""
    made: list[Value] = []
    for dtype in ("bf16", "f16"):
        x, y = column(b, "some", 21, dtype), column(b, "other", 21, dtype)
        made += [b.op("mul", b.op("add", x, y), b.op("sub", x, Scalar(0.3))), b.op("div", x, Scalar(3.0))]
        made += [b.op("maximum", x, y), b.op("silu", x), b.op("where", b.op("lt", x, y), x, b.op("neg", y))]
    return made


def doubles(b: GraphBuilder) -> list[Value]:
    x, y = column(b, "some", 21, "f64"), column(b, "other", 21, "f64")
    tiny = b.op("mul", b.op("add", x, Scalar(1e-12)), Scalar(1.0 + 1e-13))
    return [b.op("mul", b.op("sub", tiny, x), Scalar(1e12)), b.op("sqrt", b.op("abs", b.op("div", x, y)))]


def shapes(b: GraphBuilder) -> list[Value]:
    """A scalar, a column and a row beside tensors of four axes; and a number that the step's size gives."""
    a = b.op("reshape", column(b, "bc.a", 15), shape=(T, 3, 1, 5))
    c = b.op("reshape", column(b, "bc.c", 20), shape=(T, 1, 4, 5))
    first = b.op("mul", b.op("add", a, weight("bc.row", 5)), b.op("sub", c, weight("bc.one", 1)))
    count = b.op("cast", b.op("dim", size=T), dtype="f32")
    second = b.op("mul", b.op("mul", a, weight("bc.three", 3, 1, 1)), b.op("div", count, Scalar(2.0)))
    pos = b.op("cast", arg(b, "pos"), dtype="f32")
    return [first, second, b.op("mul", b.op("reshape", pos, shape=(T, 1)), weight("bc.row", 5))]


CASES: tuple[Case, ...] = (
    functions, functions_of_positive_numbers, rotations, powers, quotients, with_nan, integers, truth, narrow,
    doubles, shapes,
)  # fmt: skip
EXACT = {quotients, with_nan, integers, truth, narrow}


def weights(rng: np.random.Generator) -> dict[str, Array]:
    given = {"numbers": NUMBERS, "positive": POSITIVE, "angles": ANGLES, "whole": WHOLE}
    found = {name: np.tile(np.asarray(v, np.float32), (VOCAB, 1)) for name, v in given.items()}
    found["nan.x"] = np.tile(
        np.asarray([NAN, NAN, 0.5, 1.0, -1.0, INF, -INF, 0.0, -0.0], np.float32), (VOCAB, 1)
    )
    found["nan.y"] = np.tile(
        np.asarray([NAN, 1.0, NAN, 2.0, -1.0, INF, 3.0, -0.0, 0.0], np.float32), (VOCAB, 1)
    )
    sizes = {"some": (VOCAB, 21), "other": (VOCAB, 21), "bc.a": (VOCAB, 15), "bc.c": (VOCAB, 20)}
    sizes |= {"bc.row": (5,), "bc.one": (1,), "bc.three": (3, 1, 1)}
    return found | {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def graph() -> tuple[Graph, dict[str, slice]]:
    b, _ = paged_builder()
    results, columns, start = [], {}, 0
    for case in CASES:
        first = start
        for value in case(b):
            type_ = tensor_of(value)
            width = int(np.prod([int(d) for d in type_.shape[1:]]))
            wide = value if type_.dtype is DType.F32 else b.op("cast", value, dtype="f32")
            results.append(b.op("reshape", wide, shape=(T, width)))
            start += width
        columns[case.__name__] = slice(first, start)
    return b.graph([b.op("concat", *results, axis=1)]), columns


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Array, Array]:
    model = TritonModel(graph()[0], weights(np.random.default_rng(3)), tmp_path_factory.mktemp("pointwise"))
    chunks = [Chunk(list(range(4)), 2, [i * 7 % VOCAB for i in range(17)])]
    return model.step([], chunks), reference_step(model.graph, model.weights, [], chunks)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_close_to_float64(both: tuple[Array, Array], case: Case) -> None:
    """Tolerances are f32's own, of exp times the size of its operand: 80 is the largest here."""
    got, want = (a[:, graph()[1][case.__name__]] for a in both)
    error = 0 if case in EXACT else 8e-6 if case is functions else 1e-6
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=error, atol=error * 1e-1)


def test_what_cannot_be_computed_is_refused_with_its_place() -> None:
    for dtype, kind in (("f64", "tanh"), ("i32", "pow"), ("bool", "lt")):
        b, _ = paged_builder()
        x = column(b, "some", 21, dtype)
        y = b.op(kind, x, *([] if kind == "tanh" else [x]), loc="model.layers.3.mixer")
        with pytest.raises(
            triton.CodegenError, match=rf"model\.layers\.3\.mixer: no Triton kernel for {kind}"
        ):
            triton.generate(
                lower(b.graph([b.op("cast", y, dtype="f32")]), "gpu"), triton.find_device("cuda:sm_90")
            )


def test_equal_groups_are_one_kernel() -> None:
    b, _ = paged_builder()
    x = column(b, "some", 21)
    for _ in range(3):  # a copy of rows in between keeps the groups apart
        x = b.op("take_rows", b.op("silu", b.op("mul", x, weight("bc.row", 1))), arg(b, "rows"))
    generated = triton.generate(lower(b.graph([x]), "gpu"), triton.find_device("cuda:sm_90"))
    assert sum(k.function.startswith("pointwise") for k in generated.kernels) == 1
