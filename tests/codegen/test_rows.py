"""Norms, rotary embedding, gathers, reductions, copies and printed pointwise groups against float64, at odd
sizes; and the bits of a row alone, in batches and on any number of threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from codegen import cpp
from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Scalar, Value
from ir.types import DType, Tensor
from tests.codegen.harness import Chunk, Model, arg, levels, lower, paged_builder, reference_step, weight

VOCAB = 40
T = symbol("T")
Case = Callable[[GraphBuilder], Value]


def source(b: GraphBuilder, name: str, *shape: int) -> Value:
    """Random rows [T, *shape], chosen by the token's id."""
    width = int(np.prod(shape))
    flat = b.op("embed", arg(b, "ids"), weight(f"{name}.table", VOCAB, width))
    return flat if len(shape) == 1 else b.op("reshape", flat, shape=(T, *shape))


def angles(b: GraphBuilder, name: str, *shape: int) -> tuple[Value, Value]:
    raw = source(b, name, *shape)
    return b.op("cos", raw), b.op("sin", raw)


def rms(b: GraphBuilder) -> Value:
    return b.op("rms_norm", source(b, "rms", 37), weight("rms.w", 37), eps=1e-5)


def rms_heads(b: GraphBuilder) -> Value:
    return b.op("rms_norm", source(b, "rms_heads", 3, 20), weight("rms_heads.w", 20), eps=1e-6)


def rms_per_head(b: GraphBuilder) -> Value:
    return b.op("rms_norm", source(b, "rms_per", 3, 20), weight("rms_per.w", 3, 20), eps=1e-6)


def rms_two_axes(b: GraphBuilder) -> Value:
    return b.op("rms_norm", source(b, "rms_two", 3, 20), weight("rms_two.w", 3, 20), eps=1e-6, rank=2)


def rms_plain(b: GraphBuilder) -> Value:
    return b.op("rms_norm", source(b, "rms_plain", 16), eps=1e-6)


def layer(b: GraphBuilder) -> Value:
    return b.op("layer_norm", source(b, "ln", 53), weight("ln.w", 53), weight("ln.b", 53), eps=1e-5)


def layer_plain(b: GraphBuilder) -> Value:
    return b.op("layer_norm", source(b, "lnp", 2, 33), None, None, eps=1e-5)


def rope_half(b: GraphBuilder) -> Value:
    return b.op("rope", source(b, "rope", 3, 20), *angles(b, "rope.a", 1, 10))


def rope_part(b: GraphBuilder) -> Value:
    return b.op("rope", source(b, "rope_part", 2, 32), *angles(b, "rope_part.a", 1, 5), offset=7)


def rope_interleaved(b: GraphBuilder) -> Value:
    x = source(b, "rope_i", 2, 18)
    return b.op("rope", x, *angles(b, "rope_i.a", 1, 6), interleaved=True, offset=4)


def rope_per_head(b: GraphBuilder) -> Value:
    return b.op("rope", source(b, "rope_h", 2, 16), *angles(b, "rope_h.a", 2, 8))


def rope_of_a_view(b: GraphBuilder) -> Value:
    parts = b.op("split", source(b, "rope_v", 80), axis=1, sizes=(32, 48), several=True)
    return b.op("rope", b.op("reshape", parts[1], shape=(T, 3, 16)), *angles(b, "rope_v.a", 1, 8))


def positions(b: GraphBuilder) -> Value:
    """Rotary angles as models make them: positions times frequencies."""
    pos = b.op("reshape", b.op("cast", arg(b, "pos"), dtype="f32"), shape=(T, 1))
    angle = b.op("mul", pos, weight("inv_freq", 9))
    return b.op("concat", b.op("cos", angle), b.op("sin", angle), axis=1)


def chain(b: GraphBuilder) -> Value:
    x, y = source(b, "chain.x", 2, 19), source(b, "chain.y", 2, 19)
    scaled = b.op("mul", b.op("add", x, weight("chain.row", 19)), b.op("sigmoid", y))
    return b.op("sub", b.op("tanh", scaled), b.op("div", y, Scalar(3.5)))


def broadcasts(b: GraphBuilder) -> Value:
    a, c = source(b, "bc.a", 3, 1, 5), source(b, "bc.c", 1, 4, 5)
    return b.op("maximum", b.op("mul", a, c), b.op("expand", source(b, "bc.e", 1, 1, 5), shape=(T, 3, 4, 5)))


def choices(b: GraphBuilder) -> Value:
    x, y = source(b, "ch.x", 31), source(b, "ch.y", 31)
    both = b.op("and", b.op("gt", x, y), b.op("not", b.op("lt", x, Scalar(0.0))))
    return b.op("where", both, b.op("clamp", x, low=-0.2, high=0.1), b.op("pow", y, Scalar(2.0)))


def truths(b: GraphBuilder) -> Value:
    """Of floats, and floats of them, where all else is f32."""
    x = source(b, "tr", 3, 9)
    some = b.op("cast", b.op("relu", x), dtype="bool")
    ones = b.op("cast", b.op("lt", x, Scalar(0.1)), dtype="f32")
    return b.op("add", b.op("where", some, x, Scalar(7.0)), ones)


def integers(b: GraphBuilder) -> Value:
    pos = b.op("cast", arg(b, "pos"), dtype="i64")
    half = b.op("floordiv", b.op("sub", pos, Scalar(20)), Scalar(3))
    rest = b.op("mod", b.op("sub", pos, Scalar(20)), Scalar(3))
    odd = b.op("cast", b.op("eq", rest, Scalar(1)), dtype="i64")
    total = b.op("add", b.op("mul", half, Scalar(10)), b.op("add", rest, odd))
    return b.op("cast", b.op("reshape", total, shape=(T, 1)), dtype="f32")


def rounded(b: GraphBuilder) -> Value:
    narrow = b.op("cast", source(b, "bf", 21), dtype="bf16")
    return b.op("cast", b.op("mul", b.op("neg", narrow), narrow), dtype="f32")


def functions(b: GraphBuilder) -> Value:
    x = source(b, "fn", 17)
    terms = [
        b.op(kind, x)
        for kind in ("exp", "erf", "relu", "silu", "gelu", "gelu_tanh", "softplus", "abs", "floor")
    ]
    positive = b.op("add", b.op("abs", x), Scalar(0.1))
    terms += [b.op(kind, positive) for kind in ("log", "sqrt", "rsqrt")]
    terms.append(b.op("pow", positive, Scalar(1.7)))
    total = terms[0]
    for term in terms[1:]:
        total = b.op("add", total, term)
    return total


def reductions(b: GraphBuilder) -> Value:
    x = source(b, "red", 3, 25)
    s, m, top = (b.op(kind, x, axes=(2,), keepdims=True) for kind in ("sum", "mean", "max"))
    flat = b.op("mean", x, axes=(1, 2), keepdims=False)
    wide = b.op("reshape", b.op("concat", s, m, top, axis=2), shape=(T, 9))
    return b.op("add", wide, b.op("reshape", flat, shape=(T, 1)))


def folds(b: GraphBuilder) -> Value:
    """Over axes that others follow."""
    x = source(b, "fold_axes", 2, 3, 5, 19)
    middle = b.op("sum", x, axes=(2,))
    pair = b.op("mean", x, axes=(1, 2))
    top = b.op("max", x, axes=(3, 2, 1), keepdims=True)
    high = b.op("max", x, axes=(2,), keepdims=True)
    parts = [b.op("reshape", y, shape=(T, width_of(y))) for y in (middle, pair, top, high)]
    return b.op("concat", *parts, axis=1)


def softmax(b: GraphBuilder) -> Value:
    return b.op("softmax", source(b, "soft", 2, 27), axis=2)


def cumsum(b: GraphBuilder) -> Value:
    return b.op("cumsum", source(b, "cum", 13), axis=1)


def moves(b: GraphBuilder) -> Value:
    x = b.op("transpose", source(b, "mv", 3, 4, 5), perm=(0, 3, 1, 2))
    part = b.op("slice", x, axis=2, start=1, stop=3)
    strided = b.op("slice", part, axis=1, start=0, stop=5, step=2)
    return b.op("concat", strided, strided, axis=1)


def inner_split(b: GraphBuilder) -> Value:
    first, second = b.op("split", source(b, "sp", 3, 14), axis=2, sizes=(5, 9), several=True)
    return b.op("concat", second, first, axis=2)


def products(b: GraphBuilder) -> Value:
    return b.op("matmul", source(b, "mm.x", 2, 3, 7), source(b, "mm.y", 2, 7, 5))


def looked_up_bf16(b: GraphBuilder) -> Value:
    """The same in bf16, of odd width: the table lies in pairs."""
    table = weight("tied16", VOCAB, 19, dtype=DType.BF16)
    x = b.op("embed", arg(b, "ids"), table, dtype="f32")
    y = b.op("linear", b.op("cast", x, dtype="bf16"), table, dtype="f32")
    return b.op("concat", x, y, axis=1)


def looked_up(b: GraphBuilder) -> Value:
    """An embedding table that a linear reads too, and rows taken from a constant."""
    x = b.op("embed", arg(b, "ids"), weight("tied", VOCAB, 19))
    y = b.op("linear", x, weight("tied", VOCAB, 19))
    return b.op("add", y, b.op("take", weight("taken", VOCAB, VOCAB), arg(b, "ids"), axis=0))


def columns(b: GraphBuilder) -> Value:
    """Columns in another order, twice each."""
    order = b.op("concat", *[b.op("iota", size=19, dtype="i32")] * 2, axis=0)
    order = b.op(
        "reshape", b.op("transpose", b.op("reshape", order, shape=(2, 19)), perm=(1, 0)), shape=(38,)
    )
    return b.op("take", source(b, "cols", 21), order, axis=1)


def folded(b: GraphBuilder) -> Value:
    """Weights computed from weights: nothing of it is left at run time."""
    w = b.op("concat", weight("fold.a", 10, 6), b.op("mul", weight("fold.b", 7, 6), Scalar(0.5)), axis=0)
    w = b.op("add", w, weight("fold.row", 6))
    turned = b.op("transpose", weight("fold.t", 6, 17), perm=(1, 0))
    y = b.op("linear", source(b, "fold.x", 6), w)
    return b.op("add", y, b.op("linear", source(b, "fold.x", 6), turned))


CASES: tuple[Case, ...] = (
    rms, rms_heads, rms_per_head, rms_two_axes, rms_plain, layer, layer_plain, rope_half, rope_part,
    rope_interleaved, rope_per_head, rope_of_a_view, positions, chain, broadcasts, choices, truths, integers,
    rounded, functions, reductions, folds, softmax, cumsum, moves, inner_split, products, looked_up,
    looked_up_bf16, columns, folded,
)  # fmt: skip


def width_of(value: Value) -> int:
    assert isinstance(value.type, Tensor)
    return int(np.prod([int(d) for d in value.type.shape[1:]]))


def graph() -> tuple[Graph, dict[str, slice]]:
    b, _ = paged_builder()
    results, columns, start = [], {}, 0
    for case in CASES:
        value = case(b)
        columns[case.__name__] = slice(start, start + width_of(value))
        start += width_of(value)
        results.append(b.op("reshape", value, shape=(T, width_of(value))))
    return b.graph([b.op("concat", *results, axis=1)]), columns


@pytest.fixture(scope="module", params=levels())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(graph()[0], None, tmp_path_factory.mktemp("rows"), request.param)


def run(model: Model, first: int, count: int, threads: int = 2) -> np.ndarray:
    engine = model.open(threads)
    out = model.step(engine, [], [chunk(first, count)])
    model.library.octavo_close(engine)
    return out


def chunk(first: int, count: int) -> Chunk:
    return Chunk(list(range(64)), first, [(i * 11 + 5) % VOCAB for i in range(first, first + count)])


@pytest.fixture(scope="module")
def both(model: Model) -> tuple[np.ndarray, np.ndarray]:
    return run(model, 0, 70), reference_step(model.graph, model.weights, [], [chunk(0, 70)])[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_close_to_float64(both: tuple[np.ndarray, np.ndarray], case: Case) -> None:
    got, want = (a[:, graph()[1][case.__name__]] for a in both)
    assert np.abs(got - want).max() <= (4e-6 if case is not rounded else 0) * max(1.0, np.abs(want).max())


def test_bits_do_not_depend_on_the_batch_or_the_threads(
    model: Model, both: tuple[np.ndarray, np.ndarray]
) -> None:
    for threads in (1, 3):
        assert np.array_equal(run(model, 0, 70, threads), both[0])
    for first, count in [(0, 1), (7, 1), (3, 15), (20, 16), (30, 17), (39, 31)]:
        assert np.array_equal(run(model, first, count), both[0][first : first + count])


def test_nothing_of_a_weights_computation_is_left() -> None:
    generated = cpp.generate(lower(graph()[0]))
    body = generated.sources["forward.cpp"]
    assert "fold.a" not in body and "transpose @fold.t" not in body
    assert generated.weight_order.count("tied.panels") == 1 and "tied.table" not in generated.weight_order


def test_an_op_without_a_kernel_is_refused_with_its_place() -> None:
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("w", 5, 6))
    moved = b.op("transpose", x, perm=(1, 0), loc="model.layers.3.mixer")
    back = b.op("transpose", moved, perm=(1, 0))
    with pytest.raises(cpp.CodegenError, match=r"model\.layers\.3\.mixer: no C\+\+ kernel for transpose"):
        cpp.generate(lower(b.graph([back])))


def test_names_from_a_checkpoint_cannot_leave_their_comment() -> None:
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("w", 5, 6), loc="evil\\\n#include </etc/passwd> \u2028 \\")
    text = cpp.generate(lower(b.graph([b.op("neg", x)]))).sources["forward.cpp"]
    assert all(line.lstrip().startswith("//") for line in text.splitlines() if "passwd" in line)
    assert not any(line.endswith("\\") for line in text.splitlines())


def test_dtypes_of_packed_weights() -> None:
    assert cpp.weights.packed_dtype(DType.BF16, "panels") is DType.BF16
    assert cpp.weights.packed_dtype(DType.BF16, "plain") is DType.F32
