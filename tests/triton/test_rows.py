"""Norms, rotary embedding, reductions and small products under Triton's interpreter, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen import triton
from codegen.cache import Cache
from codegen.triton.build import build_kernels
from codegen.triton.launch import Kernel
from codegen.triton.schedule import whole_rows
from ir.build import GraphBuilder
from ir.graph import Graph, Scalar, Value, tensor_of
from ir.types import DType
from tests.codegen import test_bf16_results as bf16
from tests.codegen.harness import Array, lower, paged_builder, random_weights, reference_step, weight
from tests.codegen.test_rows import CASES, VOCAB, T, angles, chunk, folds, rounded, source, width_of
from tests.triton.harness import TritonModel

F32_ERROR = 4e-6
BF16_ERROR = 2.0**-8  # half a unit in the last place of a number below 2
Case = Callable[[GraphBuilder], Value]


def joined(cases: Sequence[Case]) -> tuple[Graph, dict[str, slice]]:
    """All cases as one graph, and which columns of its result each has."""
    b, _ = paged_builder()
    results: list[Value] = []
    columns: dict[str, slice] = {}
    start = 0
    for case in cases:
        value = case(b)
        width = width_of(value)
        wide = value if tensor_of(value).dtype is DType.F32 else b.op("cast", value, dtype="f32")
        columns[case.__name__] = slice(start, start + width)
        results.append(b.op("reshape", wide, shape=(T, width)))
        start += width
    return b.graph([b.op("concat", *results, axis=1)]), columns


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return TritonModel(joined(CASES)[0], None, tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def both(model: TritonModel) -> tuple[Array, Array]:
    return model.step([], [chunk(0, 70)]), reference_step(model.graph, model.weights, [], [chunk(0, 70)])[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_close_to_float64(both: tuple[Array, Array], case: Case) -> None:
    got, want = (a[:, joined(CASES)[1][case.__name__]] for a in both)
    assert np.abs(got - want).max() <= (F32_ERROR if case is not rounded else 0) * max(
        1.0, np.abs(want).max()
    )


def test_bits_do_not_depend_on_the_batch(model: TritonModel, both: tuple[Array, Array]) -> None:
    """Of every case but those with linears, whose tiles depend on it."""
    for first, count in [(7, 1), (3, 15), (30, 17)]:
        got = model.step([], [chunk(first, count)])
        for name, columns in joined(CASES)[1].items():
            want = both[0][first : first + count, columns]
            if "looked_up" in name or name == "folded":
                np.testing.assert_allclose(got[:, columns], want, atol=F32_ERROR)
            else:
                np.testing.assert_array_equal(got[:, columns], want, name)


# --- long rows, whole or in parts


def long_case(kind: str, width: int, **attrs: Any) -> Case:
    def case(b: GraphBuilder) -> Value:
        x = source(b, f"long{width}", width)
        weights = [weight(f"long{width}.w", width)] if "norm" in kind else []
        if kind == "layer_norm":
            x = b.op("add", x, Scalar(0.7))
        return b.op(kind, x, *weights, **attrs)

    case.__name__ = f"{kind}_{width}"
    return case


LONG: list[Case] = [
    long_case(kind, width, **attrs)
    for width in (5000, 20000)
    for kind, attrs in {
        "rms_norm": {"eps": 1e-6}, "layer_norm": {"eps": 1e-6}, "softmax": {"axis": 1}, "cumsum": {"axis": 1},
        "sum": {"axes": (1,), "keepdims": True}, "mean": {"axes": (1,), "keepdims": True},
        "max": {"axes": (1,), "keepdims": True},
    }.items()
]  # fmt: skip


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Array, Array]:
    model = TritonModel(joined(LONG)[0], None, tmp_path_factory.mktemp("long"))
    return model.step([], [chunk(0, 9)]), reference_step(model.graph, model.weights, [], [chunk(0, 9)])[0]


@pytest.mark.parametrize("case", LONG, ids=lambda c: c.__name__)
def test_long_rows_are_close_to_float64(long_rows: tuple[Array, Array], case: Case) -> None:
    got, want = (a[:, joined(LONG)[1][case.__name__]] for a in long_rows)
    assert np.abs(got - want).max() <= F32_ERROR * np.abs(want).max()


def test_long_rows_are_taken_whole_and_in_parts() -> None:
    device = triton.find_device("triton-interpret")
    assert whole_rows(device, 5000).block >= 5000 and whole_rows(device, 20000).block < 20000


# --- bf16 operands and results


def halved(b: GraphBuilder, name: str, *shape: int) -> Value:
    return b.op("cast", source(b, name, *shape), dtype="bf16")


def rms_of_bf16(b: GraphBuilder) -> Value:
    return b.op("rms_norm", halved(b, "h.rms", 37), weight("h.w", 37, dtype=DType.BF16), eps=1e-5)


def layer_of_f16(b: GraphBuilder) -> Value:
    w = weight("h.w16", 33, dtype=DType.F16)
    return b.op("layer_norm", b.op("cast", source(b, "h.ln", 33), dtype="f16"), w, w, eps=1e-5, dtype="f32")


def rope_of_bf16(b: GraphBuilder) -> Value:
    return b.op("rope", halved(b, "h.rope", 3, 20), *angles(b, "h.a", 1, 7), offset=3)


def rope_by_one_angle(b: GraphBuilder) -> Value:
    """The same angles for every token."""
    c, s = (b.op("cast", weight(f"h.{n}", 1, 1, 10), dtype="f32") for n in ("cos", "sin"))
    return b.op("rope", halved(b, "h.one", 3, 20), c, s, interleaved=True)


def reductions_of_bf16(b: GraphBuilder) -> Value:
    x = halved(b, "h.red", 3, 25)
    parts = [b.op(kind, x, axes=(2,), keepdims=True) for kind in ("sum", "mean", "max")]
    return b.op("concat", *parts, b.op("softmax", x, axis=2), b.op("cumsum", x, axis=2), axis=2)


def cumsum_of_integers(b: GraphBuilder) -> Value:
    x = b.op("cast", b.op("mul", source(b, "h.int", 13), Scalar(50.0)), dtype="i64")
    return b.op("cast", b.op("cumsum", x, axis=1), dtype="f32")


def product_of_bf16(b: GraphBuilder) -> Value:
    return b.op("matmul", halved(b, "h.x", 2, 3, 7), halved(b, "h.y", 2, 7, 5))


def product_by_one_factor(b: GraphBuilder) -> Value:
    return b.op("matmul", source(b, "h.one_x", 3, 7), weight("h.factor", 7, 5))


NARROW: tuple[Case, ...] = (
    rms_of_bf16, layer_of_f16, rope_of_bf16, rope_by_one_angle, reductions_of_bf16, cumsum_of_integers,
    product_of_bf16, product_by_one_factor,
)  # fmt: skip


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Array, Array]:
    model = TritonModel(joined(NARROW)[0], None, tmp_path_factory.mktemp("narrow"))
    return model.step([], [chunk(0, 15)]), reference_step(model.graph, model.weights, [], [chunk(0, 15)])[0]


@pytest.mark.parametrize("case", NARROW, ids=lambda c: c.__name__)
def test_narrow_operands_are_widened(narrow: tuple[Array, Array], case: Case) -> None:
    got, want = (a[:, joined(NARROW)[1][case.__name__]] for a in narrow)
    wide = case in (layer_of_f16, cumsum_of_integers, product_by_one_factor)
    error = F32_ERROR if wide else BF16_ERROR
    np.testing.assert_allclose(got, want, rtol=error, atol=error)


def test_bf16_results_are_rounded_to_nearest(tmp_path_factory: pytest.TempPathFactory) -> None:
    b, _ = paged_builder()
    made = [
        part for case in (bf16.rms, bf16.layer) for part in (case(b, None), bf16.widened(b, case(b, "bf16")))
    ]
    rows = [b.op("reshape", m, shape=(T, width_of(m))) for m in made]
    model = TritonModel(b.graph([b.op("concat", *rows, axis=1)]), None, tmp_path_factory.mktemp("rounded"))
    got = np.split(model.step([], [chunk(0, 15)]), np.cumsum([width_of(m) for m in made])[:-1], axis=1)
    for wide, cut in zip(got[0::2], got[1::2], strict=True):
        np.testing.assert_array_equal(cut, wide.astype(DType.BF16.numpy).astype(np.float32))
        assert (cut != wide).any()


# --- what is no number, and what there is no kernel for


def test_nan_stays_nan(tmp_path_factory: pytest.TempPathFactory) -> None:
    b, _ = paged_builder()
    x = source(b, "odd", 6)
    top = b.op("max", x, axes=(1,), keepdims=True)
    graph = b.graph([b.op("concat", b.op("softmax", x, axis=1), top, axis=1)])
    weights = random_weights(graph, np.random.default_rng(0))
    table = weights["odd.table"]
    table[0, 2], table[1], table[2, 3], table[3] = np.nan, -np.inf, -np.inf, np.nan
    model = TritonModel(graph, weights, tmp_path_factory.mktemp("nan"))
    steps = [chunk(0, VOCAB)]
    want, _ = reference_step(model.graph, weights, [], steps)
    np.testing.assert_allclose(model.step([], steps), want, rtol=F32_ERROR)


@pytest.mark.parametrize("kind", ["softmax", "cumsum", "sum"])
def test_another_axis_is_refused_with_its_place(kind: str) -> None:
    b, _ = paged_builder()
    attrs: dict[str, Any] = {"axes": (1, 3)} if kind == "sum" else {"axis": 1}
    y = b.op(kind, source(b, "x", 3, 5, 2), **attrs, loc="model.layers.3.mixer")
    with pytest.raises(triton.CodegenError, match=rf"model\.layers\.3\.mixer: no Triton kernel for {kind}"):
        triton.generate(lower(b.graph([y]), "gpu"), triton.find_device("cuda:sm_90"))


# --- binaries


def largest(b: GraphBuilder) -> list[Value]:
    """One of each kernel, with the most elements for a program that it has; some in parts too."""
    names = ("layer_norm_20000", "softmax_20000", "cumsum_20000", "max_20000")
    made = [case(b) for case in LONG if case.__name__ in names]
    x = source(b, "long16384", 16384)
    made += [
        b.op("layer_norm", x, weight("w", 16384), weight("b", 16384), eps=1e-6),
        b.op("softmax", x, axis=1),
    ]
    heads = halved(b, "heads", 32, 128)
    made += [b.op("rms_norm", heads, weight("h", 128), eps=1e-6), b.op("rope", heads, *angles(b, "a", 1, 64))]
    made += [case(b) for case in (reductions_of_bf16, cumsum_of_integers, product_of_bf16, folds)]
    return made


def once(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Of what only brings rows here and takes them away, the largest for each combination of types."""
    found: dict[Any, Kernel] = {}
    for kernel in sorted(kernels, key=lambda k: int(dict(k.constants).get("BLOCK", 0))):
        types = tuple(type_ for _, type_ in kernel.signature)
        around = stem(kernel) in ("embed", "pointwise")
        found[(stem(kernel), types) if around else kernel.name] = kernel
    return [*found.values()]


def stem(kernel: Kernel) -> str:
    return kernel.function.rstrip("_0123456789")


@pytest.mark.parametrize("target", ["cuda:sm_80", "hip:gfx942"])
def test_kernels_compile_and_fit_registers(tmp_path: Path, target: str) -> None:
    b, _ = paged_builder()
    rows = [b.op("reshape", m, shape=(T, width_of(m))) for m in largest(b)]
    ends = [b.op("cast", b.op("slice", r, axis=1, start=0, stop=1), dtype="f32") for r in rows]
    total = ends[0]
    for end in ends[1:]:
        total = b.op("add", total, end)
    generated = triton.generate(lower(b.graph([total]), "gpu"), triton.find_device(target))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/kernels.py").write_text(generated.source)
    kernels = once([k for k in generated.kernels if not k.function.startswith("sample")])
    built = build_kernels(tmp_path, kernels, generated.device, cache=Cache(tmp_path / "cache"))
    stems = {"rms_norm", "layer_norm", "softmax", "cumsum", "rope", "matmul", "sum", "mean", "max", "concat"}
    stems |= {"fold_sum", "fold_mean", "fold_max"}
    assert stems | {"embed", "pointwise"} <= {stem(k.kernel) for k in built}
    assert {k.kernel.function: k.spills for k in built if k.spills} == {}
