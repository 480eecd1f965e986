"""qmoe_linear against float64 in every format of qlinear, and its bits whatever rows are beside a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from ir.dims import symbol
from ir.graph import Graph, Value
from tests.codegen.experts import VOCAB, Array, chosen, draw_experts, per_slot, source
from tests.codegen.harness import Model, levels, paged_builder, weight
from tests.codegen.test_moe_linear import forward, ids, run
from tests.codegen.test_qlinear import Case, activate, matrix, operands, rounded
from tests.codegen.test_qlinear import draw as draw_matrix


@dataclass(frozen=True)
class Experts:
    """of: one expert's matrix. slots: whether each slot has a row of its own."""

    of: Case
    count: int
    top: int
    slots: bool = False
    choice: str = "any"

    @property
    def stacked(self) -> Case:
        return replace(self.of, n=self.of.n * self.count)


CASES = {
    "u4": Experts(Case(96, 48, "u4", 32, 8), 8, 2),
    "u4_64": Experts(Case(131, 41, "u4", 64, 8, bias=True), 5, 3, slots=True),
    "u4_wide": Experts(Case(1537, 33, "u4", 32, 8, bias=True), 3, 2),
    "u4_wide_slots": Experts(Case(9001, 17, "u4", 128, 8), 2, 2, slots=True),  # rows of more than OWN_ROW
    "u4_wide_rows": Experts(Case(16417, 16, "u4", 32, 8), 2, 2),  # the same, each read by two pairs
    "u4_whole": Experts(Case(70, 16, "u4", 0, 8, x=("i8", 0)), 4, 4),
    "u4_gated": Experts(Case(64, 2 * 23, "u4", 32, 8, gated=True, activation="silu", bias=True), 6, 2),
    "u4_same": Experts(Case(289, 15, "u4", 128, 8, x=("i8", 0)), 4, 2, choice="same"),
    "u4_offsets": Experts(Case(100, 31, "u4", 32, offset=True), 7, 1),
    "u4_zeros": Experts(Case(130, 47, "u4", 128, "each"), 3, 2, slots=True),
    "i8": Experts(Case(97, 50, "i8", 32), 30, 4),
    "i8_whole": Experts(Case(300, 17, "i8", 0, x=("i8", 0), bias=True), 8, 2, choice="few"),
    "i8_sixteens": Experts(Case(95, 29, "i8", 16), 1, 1),
    "i8_gated": Experts(Case(33, 2 * 16, "i8", 64, gated=True, activation="silu"), 4, 2, slots=True),
    "i8_bf16": Experts(Case(71, 32, "i8", 32, x_type="bf16"), 4, 2),
    "u8": Experts(Case(63, 20, "u8", 32, 32), 4, 2),
    "u8_zeros": Experts(Case(17, 15, "u8", 32, "each"), 4, 2),
    "u8_offsets": Experts(Case(80, 37, "u8", 32, offset=True, scale="f32"), 4, 3),
    "u4_exact": Experts(Case(131, 33, "u4", 32, 8, x=(None, 0), bias=True), 8, 2),
    "u4_zeros_exact": Experts(Case(45, 17, "u4", 32, "each", x=(None, 0)), 5, 2, slots=True),
    "i8_exact_bf16": Experts(
        Case(97, 2 * 21, "i8", 32, x=(None, 0), gated=True, activation="silu", x_type="bf16"), 4, 2
    ),
    "f8": Experts(Case(150, 35, "f8e4m3", 0, scale="f32", x=(None, 0)), 4, 2, choice="same"),
    "f8_f8": Experts(Case(150, 35, "f8e4m3", 0, scale="f32", x=("f8e4m3", 0)), 4, 2),
    "u4_odd_rows": Experts(Case(41, 16, "u4", 32, 8, x=("i8", 20)), 6, 3),
}
FEW = ("u4", "u4_gated", "i8", "i8_whole", "u8_zeros", "u4_exact", "f8_f8")  # where little differs


def graph(cases: dict[str, Experts]) -> Graph:
    b, _ = paged_builder()
    results: list[Value] = []
    for name, e in cases.items():
        shape = (e.top, e.of.k) if e.slots else (e.of.k,)
        x = source(b, name, *shape, dtype=e.of.x_type)
        q, scale, zero, offset = operands(name, e.stacked).values()
        bias = weight(f"{name}.b", e.count, e.of.n) if e.of.bias else None
        options = {"group_size": e.of.group, "zero": 0 if e.of.zero == "each" else e.of.zero, "dtype": "f32",
                   "x_dtype": e.of.x[0], "x_group_size": e.of.x[1], "activation": e.of.activation,
                   "gated": e.of.gated, "num_experts": e.count}  # fmt: skip
        args = x, q, scale, chosen(b, name, e.top), zero, offset, bias
        y = b.op("qmoe_linear", *args, loc=name, **options)
        results.append(b.op("reshape", y, shape=(symbol("T"), e.top * e.of.width)))
    return b.graph([b.op("concat", *results, axis=1)])


def draw(name: str, e: Experts, rng: np.random.Generator) -> dict[str, Array]:
    found = draw_matrix(e.stacked, name, rng)
    found[f"{name}.b"] = found[f"{name}.b"].reshape(e.count, -1)
    found[f"{name}.experts"] = draw_experts(e.count, e.top, e.choice, rng)
    if e.slots:
        x = rng.normal(0, 1, (VOCAB, e.top * e.of.k))
        x[3], x[5] = 0, 2.5
        found[f"{name}.x"] = x.astype(np.float32)
    return found


def expected(name: str, e: Experts, weights: dict[str, Array], tokens: list[int]) -> Array:
    x = weights[f"{name}.x"][tokens]
    if e.of.x_type == "bf16":
        x = (x.view(np.uint32) + 0x7FFF + (x.view(np.uint32) >> 16 & 1) & 0xFFFF0000).view(np.float32)
    flat = rounded(x.reshape(-1, e.of.k), *e.of.x)
    rows = flat.reshape(len(tokens), e.top, e.of.k) if e.slots else flat
    matrices = matrix(e.stacked, name, weights).reshape(e.count, e.of.n, e.of.k)

    def linear(expert: int, row: Array) -> Array:
        y = row @ matrices[expert].T + (weights[f"{name}.b"][expert] if e.of.bias else 0)
        if e.of.gated:
            return activate(y[:, : e.of.width], e.of.activation) * y[:, e.of.width :]
        return activate(y, e.of.activation)

    return per_slot(weights[f"{name}.experts"][tokens], rows, e.of.width, linear).reshape(len(tokens), -1)


@dataclass
class Built:
    model: Model
    cases: dict[str, Experts]

    def spans(self) -> Iterator[tuple[str, Experts, slice]]:
        """The columns of the result that are each case's."""
        start = 0
        for name, e in self.cases.items():
            yield name, e, slice(start, start + e.top * e.of.width)
            start += e.top * e.of.width


@pytest.fixture(scope="module", params=levels())
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    cases = {name: CASES[name] for name in FEW} if request.param == "baseline" else CASES
    rng = np.random.default_rng()
    weights = {key: a for name, e in cases.items() for key, a in draw(name, e, rng).items()}
    return Built(Model(graph(cases), weights, tmp_path_factory.mktemp("qmoe"), request.param), cases)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 13, 17, 33, 150])
def test_close_to_float64(built: Built, count: int) -> None:
    tokens = ids(count)
    got = forward(built.model, tokens)
    for name, e, columns in built.spans():
        want = expected(name, e, built.model.weights, tokens)
        error = np.abs(got[:, columns] - want) / (np.abs(want) + want.std() + 1e-3)
        assert error.max() < 3e-5, (name, error.max())


def test_a_row_has_the_same_bits_alone_in_batches_and_on_any_number_of_threads(built: Built) -> None:
    model, tokens = built.model, ids(150)
    together = forward(model, tokens, threads=1)
    for threads in (2, 3):
        assert np.array_equal(forward(model, tokens, threads), together)
    engine = model.open(2)
    for start, size in [(0, 1), (5, 1), (149, 1), (3, 2), (8, 6), (0, 14), (1, 15), (20, 16), (33, 31)]:
        part = run(model, engine, tokens[start : start + size])
        assert np.array_equal(part, together[start : start + size]), (start, size)
    model.library.octavo_close(engine)


def test_panels_of_codes_are_those_of_each_expert_alone(built: Built) -> None:
    """16 rows fill a panel: two experts of 23 + 23 rows take 2 * 2 panels each, whose last rows are zero."""
    e, packed = CASES["u4_gated"], {w.name: w for w in built.model.generated.weights}["u4_gated.q.paired"]
    codes = 64 * 16 // 2
    assert packed.packed_shape == (e.count * 4, 2 * 16 * 2 + codes)
    panels = np.array(built.model.packed[packed.name]).reshape(e.count, 2, 2, -1)[..., -codes:]
    quads = panels.reshape(e.count, 2, 2, 8, 16, 4)  # [expert, panel, half, K / 8, row, K of a quad]
    whole = np.stack([quads & 15, quads >> 4], 4).transpose(0, 2, 1, 5, 3, 4, 6).reshape(e.count, 2, 32, 64)
    want = built.model.weights["u4_gated.q"].astype(np.uint8).reshape(e.count, 2, 23, 64)
    assert np.array_equal(whole[:, :, :23], want) and not whole[:, :, 23:].any()
