"""`octavo explain`: what is recognised by layer, against the configuration; and the first reason why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compiler
from compiler import importers
from compiler.cli.main import main
from compiler.errors import CompileError
from compiler.explanation import Explanation
from compiler.importers import Imported, ImportRefused, ModelInfo
from compiler.weights import ArraySource
from ir.graph import Graph, tensor_of
from ir.text import print_graph
from tests.cli.staged import D, H, imported, write
from tests.compiler.decoder import Decoder, summing
from tests.compiler.moe import Moe

BYTES = {"f32": 4, "bf16": 2}


def explain(folder: Path, model: Decoder, **options: Any) -> Explanation:
    path = folder / "made.ir"
    path.write_text(print_graph(model.graph()))
    return compiler.explain(path, **options)


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["explain", *map(str, args)])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (Decoder([None] * 3, heads=6, kv_heads=2, size=10), "f32"),
        (Decoder([7, 7, None], heads=3, kv_heads=1, size=6, softcap=30.0), "bf16"),
        (Decoder([5, 9], heads=5, kv_heads=5, size=4, context=33), "f32"),
    ],
    ids=["full", "some windows", "two windows"],
)
def test_each_layer_is_as_configured(tmp_path: Path, model: Decoder, dtype: str) -> None:
    found = explain(tmp_path, model, dtype=dtype)
    assert found.refused is None
    layers = [b for b in found.layers if b.index is not None]
    assert [b.name for b in layers] == [f"model.layers.{n}" for n in range(len(model.windows))]
    for layer, window in zip(layers, model.windows, strict=True):
        (attention,) = layer.attentions
        heads = attention.query_heads, attention.kv_heads, attention.head_size, attention.value_size
        assert heads == (model.heads, model.kv_heads, model.size, model.size)
        assert attention.window == window
        assert attention.mask == "causal" + (f", window of {window}" if window else "")
        assert attention.proof == "read from the mask operand, decided symbolically"
        assert (attention.scale, attention.softcap) == (model.size**-0.5, model.softcap or 0.0)
        assert not attention.sinks and not attention.alibi
        assert attention.kv_bytes_per_token == 2 * model.kv_heads * model.size * BYTES[dtype]
        (rotary,) = layer.rotary
        assert (rotary.rotated, rotary.head_size, rotary.interleaved) == (model.size, model.size, False)
        assert rotary.tables == ("model.rotary.inv_freq",)
        assert (layer.num_linears, len(layer.linears)) == (4, 2)  # q, k and v are one; o adds the residual
        assert layer.rewritten["fuse_rope"] == 2 and layer.rewritten["fuse_attention"] == 1
        assert dict(layer.norms) == {"rms_norm (eps 1e-05)": 1}


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_shown_as_such(tmp_path: Path, shared: bool) -> None:
    found = explain(tmp_path, Decoder([None] * 2, extra=Moe(experts=6, chosen=3, inner=20, shared=shared)))
    assert found.refused is None
    for layer in found.layers[:2]:
        (experts,) = layer.experts
        assert (experts.count, experts.chosen, experts.inner) == (6, 3, 20)
        assert (experts.activation, experts.gated, experts.bias) == ("silu", True, False)
        assert (experts.scores, experts.router) == ("softmax", "moe.gate")
        assert experts.weights == ("moe.experts.up", "moe.experts.down")
        assert experts.shared == (("moe.shared",) if shared else ())
        assert "moe_linear" not in layer.others and layer.others["topk"] == 1
    assert found.json["layers"][0]["experts"][0]["count"] == 6
    row = "3 of 6 by softmax of moe.gate, width 20, silu, gated: moe.experts.up + down"
    text = " ".join(str(found).split())
    assert row + ("; and for every token moe.shared" if shared else " others") in text


def test_a_gate_that_is_no_epilogue_is_shown_by_its_ops(tmp_path: Path) -> None:
    text = print_graph(Decoder([None], extra=Moe()).graph())
    (line,) = [line for line in text.splitlines() if " = silu " in line]
    name = line.split()[0]
    clamped = line.replace(" = silu", "c = clamp").replace(" :", " {high=2.0} :").replace(name, name + "c")
    clamped = clamped.replace(name + "cc", name + "c")
    path = tmp_path / "made.ir"
    source = line.split("silu ")[1].split()[0]
    path.write_text(text.replace(line, f"{clamped}\n{line.replace(source, name + 'c')}"))
    (experts,) = compiler.explain(path).layers[0].experts
    assert (experts.activation, experts.gated) == ("clamp silu mul", True)


def test_kv_groups_hold_the_layers_of_each_window(tmp_path: Path) -> None:
    model = Decoder([7, 7, None, 7, None], heads=6, kv_heads=3, size=10)
    found = explain(tmp_path, model, dtype="bf16", block=32)
    each = 2 * 3 * 10 * 2
    assert [(g.window, g.block, g.bytes_per_token) for g in found.groups] == [
        (7, 32, 3 * each),
        (None, 32, 2 * each),
    ]
    assert found.groups[0].layers == tuple(f"model.layers.{n}.attn" for n in (0, 1, 3))
    assert found.kv_bytes_per_token == 5 * each
    assert [b.attentions[0].group for b in found.layers if b.attentions] == [0, 0, 1, 0, 1]


def test_equal_layers_are_said_once(tmp_path: Path) -> None:
    text = str(explain(tmp_path, Decoder([7, 7, None, 7, None])))
    titles = [line for line in text.splitlines() if line.startswith("model.layers ")]
    assert titles == ["model.layers 0-1, 3 (3 alike)", "model.layers 2, 4 (2 alike)"]
    assert text.count("causal, window of 7 (read") == 1


def test_a_window_past_the_context_is_said_to_hide_nothing(tmp_path: Path) -> None:
    found = explain(tmp_path, Decoder([64, 63], context=64))
    first, second = (b.attentions[0] for b in found.layers if b.attentions)
    assert (first.mask, first.window) == ("causal", None)
    assert "window of 64 hides nothing within 64" in first.proof
    assert (second.window, second.proof.count("hides")) == (63, 0)


def test_a_rotation_the_other_way_is_not_called_rotary(tmp_path: Path) -> None:
    found = explain(tmp_path, Decoder([None], straight=False))
    assert found.refused is None and not found.layers[0].rotary
    assert {m.stage for m in found.layers[0].misses} >= {"fuse_rope"}
    assert "  rotary       not fused: " in str(found)


MIXING = {
    "softmax": ("softmax", {"axis": 1}, "softmax runs along the tokens"),
    "mean": ("mean", {"axes": (1,), "keepdims": True}, "mean runs over the tokens"),
}


@pytest.mark.parametrize("kind", MIXING)
def test_what_mixes_tokens_is_the_reason_with_its_place(tmp_path: Path, kind: str) -> None:
    op, attrs, reason = MIXING[kind]
    found = explain(tmp_path, Decoder([None, 7, None], extra=summing(op, **attrs)))
    refused = found.refused
    assert refused is not None
    assert (refused.stage, refused.module, refused.reason) == ("page_kv", "model.layers.1.mix", reason)
    assert refused.op.startswith(f"%mixed = {op} ") and refused.todo
    assert [b.attentions[0].window for b in found.layers if b.attentions] == [None, 7, None]
    assert not found.groups


def test_a_refused_model_is_exit_code_two_and_what_was_recognised_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.ir"
    path.write_text(print_graph(Decoder([None, 7], extra=summing("softmax", axis=1)).graph()))
    code, out, err = run(capsys, path)
    assert (code, err) == (2, "")
    assert out.index("causal, window of 7") < out.index("Refused by page_kv")
    code, out, _ = run(capsys, path, "--json")
    found = json.loads(out)
    assert code == 2 and found["refused"]["module"] == "model.layers.1.mix"
    names = [b["name"] for b in found["layers"]]
    assert names == ["model.layers.0", "model.layers.1", ""]
    assert found["layers"][0]["norms"] == {"rms_norm (eps 1e-05)": 1}


def looks_ahead(graph: Graph) -> str:
    """The graph with the first causal comparison the other way round."""
    return print_graph(graph).replace(" = le ", " = ge ", 1)


def test_a_mask_that_looks_ahead_is_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "made.ir"
    path.write_text(looks_ahead(Decoder([None, None]).graph()))
    refused = compiler.explain(path).refused
    assert refused is not None and refused.stage == "fuse_attention"
    assert refused.reason == "the mask looks ahead: the query at position 0 sees the key at 1"
    assert refused.module == "model.layers.0.attn"


def loaded(graph: Graph, **facts: Any) -> Imported:
    arrays = {w.name: np.zeros([int(n) for n in tensor_of(w).shape], np.float32) for w in graph.weights}  # type: ignore[arg-type]
    return Imported(
        graph, ArraySource(arrays), ModelInfo("made", 31, 64, **facts), constants=("model.rotary.inv_freq",)
    )


def with_importer(monkeypatch: pytest.MonkeyPatch, give: Any) -> None:
    monkeypatch.setattr(importers, "load", lambda source, **_: give())


def test_parameters_ties_and_frozen_choices_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder([None, 7])
    frozen = {"model.rotary.inv_freq": "dynamic rotary embedding at a length of 64"}
    with_importer(monkeypatch, lambda: loaded(model.graph(), frozen=frozen))
    found = compiler.explain(object())
    assert found.model.parameters == model.num_parameters
    assert dict(found.model.tied) == {"model.embed.weight": ("model.embed", "lm_head")}
    assert (found.model.num_layers, found.model.width) == (2, model.width)
    assert dict(found.model.stored) == {"f32": model.num_parameters}
    assert "dynamic rotary embedding at a length of 64" in str(found)


def test_a_refusal_names_the_line_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Decoder([None, None], extra=summing("softmax", axis=1)).graph()
    give = Imported(
        graph, loaded(graph).weights, loaded(graph).info, lines={"mixed": "File mine.py, line 41"}
    )
    with_importer(monkeypatch, lambda: give)
    found = compiler.explain(object())
    assert found.refused is not None and found.refused.line == "File mine.py, line 41"
    assert "  line         mine.py, line 41\n" in str(found)


def test_an_op_without_converter_leaves_what_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Decoder([7])

    def refuse() -> Imported:
        refused = ImportRefused("this op has no converter", where="x", todo="Write it otherwise")
        refused.reached = model.graph()
        raise refused.at("aten.topk.default", "model.layers.1.router", "File mine.py, line 3")

    with_importer(monkeypatch, refuse)
    found = compiler.explain(object())
    assert [b.attentions[0].window for b in found.layers if b.attentions] == [7]
    assert found.refused is not None
    assert (found.refused.stage, found.refused.op) == ("import", "aten.topk.default")
    assert (found.refused.module, found.refused.line) == ("model.layers.1.router", "File mine.py, line 3")


def test_a_configuration_is_said_where_the_import_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "layer_types": ["a", "a", "b"]}))

    def refuse() -> Imported:
        raise ImportRefused("it is not known", where="config.json", todo="Wait")

    with_importer(monkeypatch, refuse)
    code, out, err = run(capsys, tmp_path)
    assert (code, err) == (2, "")
    assert "model_type=new, layer_types=[2 x a, b]" in out and "it is not known" in out
    assert "Above is" not in out


def test_a_layer_is_detailed_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.ir"
    path.write_text(print_graph(Decoder([None, 7]).graph()))
    code, out, _ = run(capsys, path, "--layer", "1")
    before, after = out.split("model.layers.1, as imported")[1].split("model.layers.1, after the passes")
    assert code == 0 and "model.layers.0" not in before + after
    assert " = concat " in before and " = rope " not in before and "attention" in before
    assert after.count(" = rope ") == 2 and "paged_attention" in after
    code, out, err = run(capsys, path, "--layer", "2")
    assert (code, out) == (2, "") and "--layer 2: the model has no such layer. Choose from 0 to 1." in err


def test_an_artifact_says_what_was_recorded(tmp_path: Path) -> None:
    text = imported(["k <= q", "(k <= q) & (q - k < 12)"])
    found = compiler.explain(write(tmp_path / "small.octavo", text).path)
    attentions = [b.attentions[0] for b in found.layers if b.attentions]
    assert [a.window for a in attentions] == [None, 12]
    assert [(a.query_heads, a.kv_heads, a.head_size) for a in attentions] == [(H // D, H // D, D)] * 2
    assert found.kv_bytes_per_token == 2 * 2 * (H // D) * D * 4
    assert (found.model.kind, found.model.max_context) == ("artifact", 64)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [("none", None, "does not exist"), ("bad.ir", "graph @g(", "line 1"), ("other.txt", "", "neither")],
)
def test_what_is_no_model_is_one_error(tmp_path: Path, name: str, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(CompileError, match=reason):
        compiler.explain(tmp_path / name)
