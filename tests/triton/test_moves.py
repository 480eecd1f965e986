"""Gathers, cuts, joins, permutations and constants under Triton's interpreter: elements arrive unchanged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from codegen import triton
from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Value, tensor_of
from ir.types import DType
from tests.codegen.harness import Array, Chunk, arg, lower, paged_builder, reference_step, weight
from tests.triton.harness import TritonModel

T, Q = symbol("T"), symbol("Q")
VOCAB = 24
Case = Callable[[GraphBuilder], list[Value]]


def rows(b: GraphBuilder, name: str, *shape: int, dtype: str = "f32") -> Value:
    x = b.op("embed", arg(b, "ids"), weight(name, VOCAB, int(np.prod(shape))))
    x = x if dtype == "f32" else b.op("cast", x, dtype=dtype)
    return x if len(shape) == 1 else b.op("reshape", x, shape=(T, *shape))


def joined(b: GraphBuilder) -> list[Value]:
    """More operands than one launch takes, of one axis after another, and views among them."""
    parts = [rows(b, f"join.{n}", 2, n, 3) for n in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)]
    wide = b.op("concat", *parts, axis=2)
    left, right = b.op("split", rows(b, "join.wide", 2500), axis=1, sizes=(1300, 1200), several=True)
    return [wide, b.op("concat", wide, wide, axis=1), b.op("concat", right, left, right, axis=1)]


def cut(b: GraphBuilder) -> list[Value]:
    x = rows(b, "cut", 4, 6, 5)
    made = [*b.op("split", x, axis=2, sizes=(1, 3, 2), several=True)]
    made += [b.op("slice", x, axis=3, start=1, stop=4), b.op("slice", x, axis=2, start=1, stop=6, step=2)]
    made.append(b.op("slice", b.op("slice", x, axis=1, start=1, stop=3), axis=1, start=0, stop=2, step=2))
    return made


def turned(b: GraphBuilder) -> list[Value]:
    x = rows(b, "turn", 3, 4, 5, 2)
    y = b.op("slice", rows(b, "turn.view", 70), axis=1, start=7, stop=67)
    y = b.op("reshape", y, shape=(T, 3, 4, 5))
    return [b.op("transpose", x, perm=(0, 4, 2, 1, 3)), b.op("transpose", y, perm=(0, 2, 3, 1))]


def expanded(b: GraphBuilder) -> list[Value]:
    return [
        b.op("expand", rows(b, "exp", 3, 1, 5), shape=(T, 3, 4, 5)),
        b.op("expand", rows(b, "e1", 1), shape=(T, 7)),
    ]


def stacked(b: GraphBuilder) -> list[Value]:
    """Rows below rows, and every other of them by their numbers."""
    x = b.op("concat", rows(b, "st.a", 6), b.op("slice", rows(b, "st.b", 9), axis=1, start=2, stop=8), axis=0)
    order = b.op("iota", size=T, dtype="i64")
    return [
        b.op("take", x, b.op("add", order, b.op("dim", size=T, dtype="i64")), axis=0),
        b.op("take", x, order, axis=0),
    ]


def constants(b: GraphBuilder) -> list[Value]:
    full = b.op("full", shape=(T, 3), value=-2.5)
    numbers = [b.op("iota", size=T, dtype=d) for d in ("i32", "i64", "f32", "bf16")]
    size, narrow = b.op("dim", size=T + 3, dtype="i64"), b.op("dim", size=T, dtype="bf16")
    return [
        full,
        *(b.op("reshape", n, shape=(T, 1)) for n in numbers),
        *(b.op("expand", s, shape=(T, 2)) for s in (size, narrow)),
    ]


def reshaped(b: GraphBuilder) -> list[Value]:
    """A view of part of each row cannot be read as rows of another number."""
    x = b.op("slice", rows(b, "re", 8), axis=1, start=1, stop=7)
    flat = b.op("reshape", x, shape=(T * 6,))
    return [b.op("reshape", b.op("neg", flat), shape=(T, 6))]


def typed(b: GraphBuilder) -> list[Value]:
    made: list[Value] = []
    for dtype in ("bf16", "f16", "i8", "u8", "i64", "f64", "bool"):
        x = rows(b, f"ty.{dtype}", 3, 4, dtype=dtype)
        made += [b.op("transpose", x, perm=(0, 2, 1)), b.op("concat", x, x, axis=2)]
    return made


CASES: tuple[Case, ...] = (joined, cut, turned, expanded, stacked, constants, reshaped, typed)


def width_of(value: Value) -> int:
    return int(np.prod([int(d) for d in tensor_of(value).shape[1:]]))


def graph() -> tuple[Graph, dict[str, slice]]:
    b, _ = paged_builder()
    results, columns, start = [], {}, 0
    for case in CASES:
        first = start
        for value in case(b):
            wide = value if tensor_of(value).dtype is DType.F32 else b.op("cast", value, dtype="f32")
            results.append(b.op("reshape", wide, shape=(T, width_of(value))))
            start += width_of(value)
        columns[case.__name__] = slice(first, start)
    return b.graph([b.op("concat", *results, axis=1)]), columns


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Array, Array]:
    model = TritonModel(graph()[0], None, tmp_path_factory.mktemp("moves"))
    model.weights |= {w: (np.abs(a) * 30).astype(np.float32) for w, a in model.weights.items()}
    model.packed = [model.weights[w.name] for w in model.generated.weights]
    chunks = [Chunk(list(range(4)), 2, [i * 7 % VOCAB for i in range(17)])]
    return model.step([], chunks), reference_step(model.graph, model.weights, [], chunks)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_elements_arrive_unchanged(both: tuple[Array, Array], case: Case) -> None:
    got, want = (a[:, graph()[1][case.__name__]] for a in both)
    np.testing.assert_array_equal(got, want)


def test_columns_are_taken_by_their_numbers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of a view too; one that is outside gives NaN."""
    b, _ = paged_builder()
    order = b.op("concat", *[b.op("iota", size=n, dtype="i32") for n in (7, 9)], axis=0)
    cut = b.op("slice", rows(b, "co", 12), axis=1, start=3, stop=11)
    graph = b.graph([b.op("take", cut, order, axis=1)])
    model = TritonModel(graph, None, tmp_path_factory.mktemp("columns"))
    ids = [5, 0, 23, 5]
    found = model.step([], [Chunk([0, 1], 0, ids)])
    want = model.weights["co"][ids][:, [*range(3, 10), *range(3, 11)]]
    np.testing.assert_array_equal(found[:, :15], want)
    assert found.shape == (4, 16) and np.isnan(found[:, 15]).all()


def test_logits_that_are_a_view_are_delivered(tmp_path_factory: pytest.TempPathFactory) -> None:
    b, _ = paged_builder()
    chosen = b.op("take_rows", rows(b, "wide", 50), arg(b, "rows"))
    graph = b.graph([b.op("slice", chosen, axis=1, start=3, stop=40)])
    model = TritonModel(graph, None, tmp_path_factory.mktemp("view"))
    chunks, picked = [Chunk([0, 1], 0, [5, 0, 23, 5])], [3, 0]
    want, _ = reference_step(model.graph, model.weights, [], chunks, picked)
    np.testing.assert_array_equal(model.step([], chunks, picked), want)
    assert model.step([], chunks, []).shape == (0, 37)


def test_a_row_outside_a_table_is_nan(tmp_path_factory: pytest.TempPathFactory) -> None:
    b, _ = paged_builder()
    table = weight("table", VOCAB, 5)
    taken = b.op("take", table, arg(b, "ids"), axis=0)
    graph = b.graph([b.op("concat", b.op("embed", arg(b, "ids"), table), taken, axis=1)])
    model = TritonModel(graph, None, tmp_path_factory.mktemp("outside"))
    got = model.step([], [Chunk([0], 0, [3, VOCAB, -1, 1 << 30, 0])])
    assert np.isnan(got[1:4]).all()
    np.testing.assert_array_equal(got[[0, 4]], np.tile(model.weights["table"][[3, 0]], 2))


def test_moving_the_first_axis_is_refused_with_its_place() -> None:
    b, _ = paged_builder()
    moved = b.op("transpose", rows(b, "x", 6), perm=(1, 0), loc="model.layers.3.mixer")
    graph = b.graph([b.op("transpose", moved, perm=(1, 0))])
    with pytest.raises(triton.CodegenError, match=r"model\.layers\.3\.mixer: no Triton kernel for transpose"):
        triton.generate(lower(graph, "gpu"), triton.find_device("cuda:sm_90"))
