"""What a compile decides of each matrix, what calibration finds, and what the gate measures of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.quantization import report
from compiler.quantization.auto import raise_until, worst_layers
from compiler.quantization.decide import Decision
from compiler.quantization.gate import EVERY, Comparison, logits_of, measure
from compiler.quantization.layers import LayerError
from compiler.quantization.options import Quantization
from compiler.quantization.text import RANDOM, Windows, packed
from ir.interpret import empty_kv, interpret
from ir.ops.quantize import dequantize, round_weight
from ir.stream import in_place, needed, stream
from ir.types import KV, DType
from passes.quantize_weights import QuantizeWeights
from tests.quantization.made import VOCAB, decision, imported, paged

TEXT = Windows(tuple(np.random.default_rng(i).integers(0, VOCAB, 40, np.int32) for i in range(3)), "made")


def test_a_stream_gives_what_the_interpreter_gives() -> None:
    model = imported()
    graph = paged(model)
    (ids,) = [TEXT.ids[0]]
    states = {v.name: v.type for v in graph.inputs if isinstance(v.type, KV)}
    inputs = packed([ids], {name: kv.block for name, kv in states.items()})
    kv = {name: empty_kv(type, 4) for name, type in states.items()}
    whole = interpret(graph, {**inputs, **kv}, model.weights.read)
    kv = {name: empty_kv(type, 4) for name, type in states.items()}
    logits = graph.outputs[0].name
    found = stream(graph, {**inputs, **kv}, model.weights.read, [logits])
    np.testing.assert_array_equal(found[logits], whole.outputs[0])
    for name, after in zip(states, whole.outputs[1:], strict=True):
        np.testing.assert_array_equal(kv[name]["k"], after["k"])  # written in place


def test_a_stream_computes_no_more_than_is_wanted() -> None:
    graph = paged(imported())
    first = next(op for op in graph.ops if op.kind == "rms_norm")
    assert [op.kind for op in needed(graph, [first.out.name])] == ["embed", "rms_norm"]


def test_a_rule_for_the_head_holds_for_the_table_that_it_is(tmp_path: Path) -> None:
    made = decision(tmp_path, Quantization("int4", algorithm="rtn", keep=("lm_head=int8",)))
    found = made.first().run(made.graph)
    rounded = [op for op in found.ops if op.kind == "quantize_weight"]
    codes = {getattr(op.args[0], "name", ""): op.attr("dtype") for op in rounded}
    assert codes.pop("model.embed.weight") == "i8"
    assert list(codes.values()) == ["u4"] * 4


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("model.layers.0", {"model.layers.1.attn", "model.layers.1.attn.o", "lm_head"}),
        ("model.layers.*.attn.q", {"model.layers.0.attn.o", "model.layers.1.attn.o", "lm_head"}),
        ("lm_head", {f"model.layers.{n}.{m}" for n in (0, 1) for m in ("attn", "attn.o")}),
    ],
)
def test_what_is_kept_stays_as_it_is(tmp_path: Path, keep: str, left: set[str]) -> None:
    made = decision(tmp_path, Quantization("int4", algorithm="rtn", keep=(keep,)))
    found = made.measured(made.first(), TEXT).measured
    assert found is not None and {e.loc for e in found.layers} - {"model.embed"} == left


def test_a_rule_may_name_a_format(tmp_path: Path) -> None:
    made = decision(tmp_path, Quantization("int4", algorithm="rtn", keep=("*.o=int8", "lm_head=int4")))
    found = made.measured(made.first(), TEXT).measured
    assert found is not None
    assert {e.loc: e.format[:2] for e in found.layers} == {
        "model.embed": "u4", "lm_head": "u4", "model.layers.0.attn": "u4", "model.layers.0.attn.o": "i8",
        "model.layers.1.attn": "u4", "model.layers.1.attn.o": "i8",
    }  # fmt: skip


def test_a_pattern_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"--keep model\.layer\.1: it names no module with a matrix"):
        decision(tmp_path, Quantization("int4", keep=("model.layer.1",)))


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_calibration_makes_layers_better(tmp_path: Path, algorithm: str) -> None:
    """Of the outputs for inputs that they were fitted to, in a model whose inputs are far from even."""
    errors = {}
    model = imported()
    for name in ("rtn", algorithm):
        asked = Quantization("int4", algorithm=name, activations="none", keep=("model.embed=int8",))
        made = decision(tmp_path / name, asked, model)  # a tied table is not fitted
        made._calibration_text = lambda: TEXT  # type: ignore[method-assign]
        found = made.measured(made.first(), TEXT).measured
        assert found is not None
        errors[name] = {e.loc: e.error for e in found.layers if e.format.startswith("u4")}
    assert len(errors["rtn"]) == 4
    gains = [errors[algorithm][loc] / errors["rtn"][loc] for loc in errors["rtn"]]
    assert max(gains) < 1 and np.mean(gains) < {"gptq": 0.8, "awq": 0.95}[algorithm]


def test_each_layer_is_fitted_to_what_the_layers_before_give_it(tmp_path: Path) -> None:
    """The second run reads codes of the first layer as fitted: those of the second depend on them."""
    codes = {}
    for keep in ((), ("model.layers.0",)):
        made = decision(tmp_path / str(len(keep)), Quantization("int4", keep=keep))
        found = made.first().weights.calibrated
        codes[keep] = made.store.read(found["model.layers.1.attn.o.weight"].q.name)
    assert (codes[()] != codes[("model.layers.0",)]).any()


@pytest.mark.parametrize(
    "name", ["model.layers.1.attn.o.weight", "model.layers.0.attn.k.weight", "model.embed.weight"]
)
@pytest.mark.parametrize("asked", [Quantization("int4"), Quantization("int8")])
def test_a_matrix_that_is_not_finite_is_refused_by_name(
    tmp_path: Path, name: str, asked: Quantization
) -> None:
    made = decision(tmp_path, asked, imported(name, np.inf))
    with pytest.raises(CompileError, match=f"tensor '{name}': 1 of [0-9,]+ weights are NaN or infinite"):
        made.first()


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (Quantization("int4", algorithm="rtn"), 8 * 65504),
        (Quantization("int4", algorithm="rtn", symmetric=False), 65504),
        (Quantization("int8", algorithm="rtn"), 127 * 65504),
    ],
)
def test_weights_whose_scales_are_beyond_their_type_are_refused_by_name(
    tmp_path: Path, asked: Quantization, most: float
) -> None:
    name = "model.layers.1.attn.o.weight"
    for value in (most, -most):
        made = decision(tmp_path, asked, imported(name, value))
        made.first().run(made.graph)
        with pytest.raises(CompileError, match=f"tensor '{name}': weights up to .* beyond f16"):
            decision(tmp_path, asked, imported(name, value * 1.01)).first()


def test_a_matrix_that_is_kept_may_be_anything(tmp_path: Path) -> None:
    broken = imported("model.embed.weight", np.nan)
    made = decision(tmp_path, Quantization("int8", algorithm="rtn", keep=("lm_head",)), broken)
    assert made.first().formats["model.embed.weight"] == "none"


def test_divergence_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(50, 9)), rng.normal(size=(50, 9))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    following = rng.integers(0, 9, 50)
    following[49] = -1
    total = Comparison()
    for part in (slice(0, 20), slice(20, 50)):
        total.add(a[part].astype(np.float32), b[part].astype(np.float32), following[part])
    found = total.result()
    kl = (p * np.log(p / q)).sum(-1)
    rows = np.arange(49)
    ratio = np.exp(np.log(p[rows, following[:49]] / q[rows, following[:49]]).mean())
    assert found.mean_kl == pytest.approx(kl.mean(), rel=1e-5)
    assert found.p99_kl == pytest.approx(np.quantile(kl, 0.99), rel=1e-5)
    assert found.top1 == (a.argmax(-1) == b.argmax(-1)).mean()
    assert found.perplexity_ratio == pytest.approx(ratio, rel=1e-5)
    assert found.positions == 50


def test_a_model_diverges_from_itself_by_nothing() -> None:
    model = imported()
    graph = paged(model)
    found = measure(graph, graph, model.weights.read, TEXT, lambda done, total: None)
    assert found.divergence.mean_kl == 0 and found.divergence.top1 == 1 and not found.layers
    assert found.divergence.positions == sum(-(-len(ids) // EVERY) for ids in TEXT.ids)


def test_the_error_of_a_layer_is_that_of_its_outputs_alone(tmp_path: Path) -> None:
    """Against products in float64 of what the layer reads in the unquantised model."""
    model = imported()
    asked = Quantization("int4", algorithm="rtn", activations="none")
    made = decision(tmp_path, asked, model)
    decided = made.first()
    found = made.measured(decided, Windows(TEXT.ids[:1], "one")).measured
    assert found is not None
    graph = made.graph
    op = next(op for op in graph.ops if op.loc == "model.layers.1.attn.o" and op.kind == "linear")
    seen: dict[str, np.ndarray] = {}

    def note(each, call):  # noqa: ANN001, ANN202
        if each is op:
            seen["x"] = call.args[0].astype(np.float64)
        return in_place(each, call)

    logits_of(graph, model.weights.read, TEXT.ids[0], note)
    w = model.weights.read("model.layers.1.attn.o.weight")
    codes, scale = round_weight(w, DType.U4, 0, True, DType.F16)
    q = dequantize(codes, scale, 8, None, 0)
    y, z = seen["x"] @ w.T.astype(np.float64), seen["x"] @ q.T.astype(np.float64)
    error = next(e.error for e in found.layers if e.loc == op.loc)
    assert error == pytest.approx(np.linalg.norm(y - z) / np.linalg.norm(y), rel=1e-4)


@pytest.mark.parametrize("kv", ["int8", "fp8", "int4", "int2"])
def test_the_cache_is_measured_too(tmp_path: Path, kv: str) -> None:
    made = decision(tmp_path, Quantization(kv=kv))
    decided = made.measured(made.first(), TEXT)
    assert decided.measured is not None and decided.measured.divergence.mean_kl > 0
    assert bool(decided.keys) == (kv in ("int8", "fp8"))


def test_past_the_bound_it_refuses_with_figures_and_ways_out(tmp_path: Path) -> None:
    made = decision(tmp_path, Quantization("int4", algorithm="rtn", max_kl=1e-9))
    decided = made.measured(made.first(), TEXT)
    with pytest.raises(CompileError, match=r"mean KL .* top-1 agreement .* the bound is 1e-09") as refused:
        report.check(made.asked, decided)
    assert "--keep" in str(refused.value) and "--quantize auto" in str(refused.value)
    assert "model.layers" in refused.value.shown
    report.check(replace(made.asked, max_kl=10.0), decided)


def test_random_tokens_refuse_only_by_a_bound_that_was_given(tmp_path: Path) -> None:
    made = decision(tmp_path, Quantization("int4", kv="int2"))
    decided = made.measured(made.first(), Windows(TEXT.ids, RANDOM))
    report.check(made.asked, decided)
    with pytest.raises(CompileError):
        report.check(replace(made.asked, max_kl=0.0), decided)


def test_auto_raises_until_it_fits(tmp_path: Path) -> None:
    made = decision(tmp_path, Quantization("auto", algorithm="rtn", activations="none"))
    start = made.measured(made.first(), TEXT)
    assert start.measured is not None and not start.raised
    bound = start.measured.divergence.mean_kl / 3
    found = raise_until(made, start, TEXT, bound)
    assert found.measured is not None and found.measured.divergence.mean_kl <= bound
    assert 0 < len(found.raised) < len(found.formats)
    nothing = raise_until(made, start, TEXT, 0.0)
    assert nothing.measured is not None and nothing.measured.divergence.mean_kl == 0
    assert set(nothing.formats.values()) == {"none"}


def test_the_worst_layers_are_those_of_most_squared_error_per_weight() -> None:
    layers = [
        LayerError("a", "a", "u4", 0.30, 1000),
        LayerError("b", "b", "u4", 0.20, 100),
        LayerError("c", "c", "u4", 0.01, 100),
    ]
    chosen = worst_layers(layers, dict.fromkeys("abc", "int4"), 1.0, 0.8)
    assert chosen == ["b"]
    assert worst_layers(layers, dict.fromkeys("abc", "int4"), 1.0, 0.05) == ["b", "a"]
    assert worst_layers(layers, dict.fromkeys("abc", "none"), 1.0, 0.05) == []


def test_decisions_are_passes_options(tmp_path: Path) -> None:
    made: Decision = decision(tmp_path, Quantization("int4", algorithm="rtn", keep=("model.embed=int8",)))
    weights = made.first().weights
    assert isinstance(weights, QuantizeWeights) and weights.group_size == 32
    assert "model.layers.0.attn.q=u4" in weights.overrides and "model.embed=i8" in weights.overrides
