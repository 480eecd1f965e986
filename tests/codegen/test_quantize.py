"""Tables of codes, codes of their own, and how matrices of codes are packed, against the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen import cpp
from codegen.cpp.pack import pack_weights
from codegen.errors import PackError
from ir.graph import Graph
from ir.types import DType
from tests.codegen.harness import Arrays, Chunk, Model, arg, load_packed, lower, paged_builder, weight
from tests.codegen.test_qlinear import CASES, Case, by_group, draw, matrix, operands, rounded

V, K = 35, 77
TOKENS = [0, 34, 15, 16, 7]


def table(name: str, case: Case) -> dict[str, Any]:
    return {"group_size": case.group, "zero": 0 if case.zero == "each" else case.zero}


TABLES = {
    "u4": Case(K, V, "u4", 32, 8),
    "u4_zeros": Case(K, V, "u4", 16, "each"),
    "u8": Case(K, V, "u8", 0, offset=True, scale="f32"),
    "f8": Case(K, V, "f8e4m3", 32, scale="f32"),
}


def graph() -> Graph:
    """Rows of tables; a row and what is left of it as codes; and a linear on a table's codes."""
    b, _ = paged_builder()
    ids = arg(b, "ids")
    found = [
        b.op("qembed", ids, *operands(name, case).values(), **table(name, case), dtype="f32")
        for name, case in TABLES.items()
    ]
    x = found[0]
    for dtype, size, scale in (("i8", 32, "f32"), ("i8", 0, "f16"), ("f8e4m3", 20, "f16")):
        q, s = b.op("quantize", x, several=True, dtype=dtype, group_size=size, scale=scale)
        found.append(b.op("dequantize", q, s, group_size=size, dtype="f32"))
    head = b.op("qlinear", x, *operands("u4", TABLES["u4"]).values(), **table("u4", TABLES["u4"]),
                x_dtype="i8", dtype="f32")  # fmt: skip
    return b.graph([b.op("concat", *found, head, axis=1)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    rng = np.random.default_rng()
    weights = {key: a for name, case in TABLES.items() for key, a in draw(case, name, rng).items()}
    return Model(graph(), weights, tmp_path_factory.mktemp("quantize"))


def test_rows_of_tables_and_codes_of_rows(model: Model) -> None:
    engine = model.open(2)
    got = model.step(engine, [], [Chunk(list(range(64)), 0, TOKENS)])
    model.library.octavo_close(engine)
    parts = np.split(got, [K * i for i in range(1, 8)], 1)
    for part, (name, case) in zip(parts, TABLES.items(), strict=False):
        want = matrix(case, name, model.weights)[TOKENS]
        assert np.allclose(part, want, rtol=1e-6, atol=1e-7), name
    x = parts[0]
    assert np.abs(parts[4] - rounded(x, "i8", 32)).max() < 1e-6
    for part, (kind, size) in zip(parts[5:7], [("i8", 0), ("f8e4m3", 20)], strict=True):
        largest = {"i8": 127, "f8e4m3": 448}[kind]
        amax = np.stack([np.abs(x[:, k : k + (size or K)]).max(1) for k in range(0, K, size or K)], 1)
        scale = by_group((amax / np.float32(largest)).astype(np.float16), K, size)
        code = part / np.where(scale == 0, 1, scale)
        exponent = np.floor(np.log2(np.abs(code) + 1e-9))
        step = np.ones_like(code) if kind == "i8" else np.maximum(np.exp2(exponent - 3), 2**-9)
        assert (np.abs(part - x) <= step * scale * 0.501 + 1e-6).all(), kind
        assert np.abs(code / step - np.rint(code / step)).max() < 1e-3, kind  # on the grid
    want = rounded(x, "i8", 32) @ matrix(TABLES["u4"], "u4", model.weights).T
    assert np.abs(parts[7] - want).max() < 1e-5 * max(1, np.abs(want).max())


def test_a_table_and_a_linear_share_one_array(model: Model) -> None:
    assert [w.name for w in model.generated.weights if w.name.startswith("u4.q")] == ["u4.q.panels"]


@pytest.mark.parametrize("name", ["u4_offsets", "u4_128", "u8_zeros", "i8_gated", "f8"])
def test_panels_hold_scales_zeros_offsets_and_quads_of_codes(name: str, tmp_path: Path) -> None:
    """Unpacked by the layout's description, packed a few rows at a time."""
    case = CASES[name]
    weights = draw(case, name, np.random.default_rng())
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight(f"{name}.x", 48, case.k))
    options = {"x_dtype": None, "gated": case.gated, "dtype": "f32"}
    linear = b.op("qlinear", x, *operands(name, case).values(), **table(name, case), **options)
    generated = cpp.generate(lower(b.graph([linear])))
    pack_weights(
        generated.graph, generated.weights, Arrays(weights), tmp_path / "w", lambda *_: None, chunk_bytes=1
    )
    (entry,) = (w for w in generated.weights if w.matrix is not None)
    panels = np.array(load_packed(tmp_path / "w")[entry.name]).reshape(entry.packed_shape)
    if case.gated:
        panels = np.concatenate([panels[0::2], panels[1::2]])
    assert_unpacks(case, name, panels, weights)


def assert_unpacks(case: Case, name: str, panels: np.ndarray, weights: dict[str, np.ndarray]) -> None:
    at, groups = 0, case.groups
    stored = np.float16 if case.scale == "f16" else np.float32
    present = {"scale": stored, "zero": np.int8 if case.zero == "each" else None,
               "offset": stored if case.offset else None}  # fmt: skip
    half = len(panels) * 8  # rows of panels of gates
    rows = list(range(case.width)) + [half + i for i in range(case.width) if case.gated]
    for part, kind in present.items():
        if kind is None:
            continue
        end = at + groups * 16 * np.dtype(kind).itemsize
        found = panels[:, at:end].copy().view(kind).reshape(-1, groups, 16).swapaxes(1, 2).reshape(-1, groups)
        shift = 128 if part == "zero" and case.codes == "u8" else 0
        want = weights[f"{name}.{part}"].astype(np.float64)
        assert np.array_equal(found[rows].astype(np.float64) + shift, want)
        at = end
    codes = panels[:, -(-at // 64) * 64 :]
    assert np.shares_memory(codes, panels) and not panels[:, at : -(-at // 64) * 64].any()
    if case.codes == "u4":
        halves = codes.reshape(len(panels), -1, 1, 16, 4)
        codes = np.concatenate([halves & 15, halves >> 4], 2)
    quads = codes.reshape(len(panels), -1, 16, 4).swapaxes(1, 2).reshape(-1, -(-case.k // 32) * 32)
    want = weights[f"{name}.q"].view(np.uint8) ^ (128 if case.codes == "u8" else 0)
    assert np.array_equal(quads[rows][:, : case.k], want) and not quads[:, case.k :].any()


@pytest.mark.parametrize("part", ["scale", "offset"])
def test_what_is_not_finite_is_named(part: str, tmp_path: Path) -> None:
    case = CASES["u4_offsets"]
    weights = draw(case, "mlp", np.random.default_rng())
    weights[f"mlp.{part}"][3, 1] = np.nan
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("mlp.x", 48, case.k))
    linear = b.op("qlinear", x, *operands("mlp", case).values(), group_size=case.group, dtype="f32")
    generated = cpp.generate(lower(b.graph([linear])))
    with pytest.raises(PackError, match="mlp.q.panels: a scale or an offset is not finite"):
        cpp.pack(generated, Arrays(weights), tmp_path / "w")


def test_groups_of_an_odd_size_are_refused() -> None:
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("x", 48, 40))
    parts = weight("q", 8, 40, dtype=DType.U4), weight("s", 8, 4)
    graph = lower(b.graph([b.op("qlinear", x, *parts, group_size=12, dtype="f32")]))
    with pytest.raises(cpp.CodegenError, match="groups of 12 elements; there are those of a multiple of 8"):
        cpp.generate(graph)
