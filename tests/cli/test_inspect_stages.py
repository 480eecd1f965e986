"""`octavo inspect`: --stages, --ir, --diff and --graph of artifacts with every stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import networkx
import pytest

from ir.text import parse, print_graph
from tests.cli.staged import LAYER, NORM, H, I, Staged, imported, octavo, write

CAUSAL, WINDOW = "k <= q", "(k <= q) & (q - k < 12)"
HOSTILE = '</script><img src=x onerror=alert(1)>"\\\n\x07%'


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    return write(tmp_path_factory.mktemp("stages") / "plain.octavo", imported([CAUSAL] * 4))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Staged:
    """Two KV groups, two targets, and hostile names."""
    text = imported([WINDOW, CAUSAL] * 2, name=HOSTILE)
    return write(tmp_path_factory.mktemp("stages") / "mixed.octavo", text, ("cpu", "cuda:sm_90"))


def said(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    code, out, err = octavo(capsys, *args)
    assert (code, err) == (0, "")
    return out


def told(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    return json.loads(said(capsys, *args, "--json"))


def test_stages_are_listed_with_their_ops(plain: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["stage"]: each["ops"] for each in told(capsys, plain.path, "--stages")}
    last = list(plain.graphs.values())[-1]
    assert found == {name: len(graph.ops) for name, graph in plain.graphs.items()} | {"graph": len(last.ops)}
    assert found["00-imported"] == 4 * LAYER + NORM + 2
    assert "00-imported" in said(capsys, plain.path, "--stages").splitlines()[0]


@pytest.mark.parametrize("wanted", ["09-fuse_norm", "9", "09", "fuse_norm"])
def test_a_stage_has_three_names(plain: Staged, capsys: pytest.CaptureFixture[str], wanted: str) -> None:
    assert said(capsys, plain.path, "--ir", wanted) == print_graph(plain.graphs["09-fuse_norm"])
    found = told(capsys, plain.path, "--ir", wanted)
    assert (found["stage"], parse(found["ir"])) == ("09-fuse_norm", plain.graphs["09-fuse_norm"])


def test_each_layer_is_shown_once(plain: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, plain.path, "--diff", "8", "13")
    counts = [Counter(op.kind for op in plain.graphs[name].ops) for name in ("08-dce", "13-dce")]
    assert found["kinds"] == {
        kind: {"before": counts[0][kind], "after": counts[1][kind]} for kind in counts[0] | counts[1]
    }
    layers = [group for group in found["groups"] if "model.layers.0" in group["sections"]]
    assert [group["sections"] for group in layers] == [[f"model.layers.{n}" for n in range(4)]]
    (layer,) = layers
    # Both norms of six ops become one, called as the last of the six; everything else stays.
    assert (layer["removed"], layer["added"], layer["changed"]) == (2 * NORM, 2, 0)
    assert layer["same"] == LAYER - 2 * NORM
    added = [change["after"] for change in layer["changes"] if change["status"] == "added"]
    assert [text.partition(" ")[0] for text in added] == ["%l0.norm1.scaled", "%l0.norm2.scaled"]
    places = [(change["status"], change["loc"]) for change in layer["changes"]]
    assert places == [*[("removed", "norm1")] * NORM, ("added", "norm1"),
                      *[("removed", "norm2")] * NORM, ("added", "norm2")]  # fmt: skip


def test_a_difference_as_text(plain: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, plain.path, "--diff", "8", "13")
    assert "\x1b" not in text  # colours are for terminals
    lines = text.splitlines()
    assert any(line.startswith("model.layers.0  (the same in model.layers.1-3)") for line in lines)
    assert any(line.split() == ["rms_norm", "0", "->", "9", "+9"] for line in lines)
    assert sum(line.startswith("  - ") for line in lines) == 2 * NORM + NORM
    assert "nothing changes" in said(capsys, plain.path, "--diff", "24", "24")


def test_what_changed_of_an_op(plain: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    """From group_pointwise to plan_memory, every op gets its buffers and nothing else happens."""
    names = list(plain.graphs)
    before, after = names[-2], names[-1]
    found = told(capsys, plain.path, "--diff", before, after)
    num_ops = len(plain.graphs[after].ops)
    assert (found["changed"], found["removed"], found["added"], found["same"]) == (num_ops, 0, 0, 0)
    whats = {tuple(change["what"]) for group in found["groups"] for change in group["changes"]}
    assert whats == {("attributes",)}


def test_both_ways_are_one_difference(mixed: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = (told(capsys, mixed.path, "--diff", *pair) for pair in (("8", "graph"), ("graph", "8")))
    assert (there["removed"], there["added"]) == (back["added"], back["removed"]) != (0, 0)
    assert (there["changed"], there["same"]) == (back["changed"], back["same"])


def test_targets_differ_in_the_memory_plan_alone(mixed: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, mixed.path, "--diff", "graph-cpu", "graph-cuda-sm_90")
    assert (found["removed"], found["added"]) == (0, 0) and found["changed"] > 0
    whats = {tuple(change["what"]) for group in found["groups"] for change in group["changes"]}
    assert whats == {("attributes",)}


def test_layers_of_two_kinds_are_told_apart(mixed: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    """Which are windowed and which are not, is what the layers of a model with two KV groups differ in."""
    found = told(capsys, mixed.path, "--diff", "14", "15")
    alike = [group["sections"] for group in found["groups"] if "model.layers.0" in group["sections"]]
    assert alike == [["model.layers.0", "model.layers.2"]]
    assert "model.layers.0  (the same in model.layers.2)" in said(capsys, mixed.path, "--diff", "14", "15")


def test_layers_of_two_kinds_may_change_alike(mixed: Staged, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, mixed.path, "--diff", "19", "24")  # an activation into the linear before it
    alike = [group["sections"] for group in found["groups"] if "model.layers.0" in group["sections"]]
    assert alike == [[f"model.layers.{n}" for n in range(3)]]  # of the last, rows are chosen


@pytest.mark.parametrize("stage", ["00-imported", "graph"])
def test_graphml_holds_the_graph(
    mixed: Staged, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    graph = parse(said(capsys, mixed.path, "--ir", stage))
    out = tmp_path / "out.graphml"
    about = told(capsys, mixed.path, "--ir", stage, "--graph", out)
    found = networkx.read_graphml(out)
    nodes = len(graph.inputs) + len(graph.ops) + len(graph.outputs)
    edges = sum(len(list(op.values)) for op in graph.ops) + len(graph.outputs)
    assert (about["nodes"], about["edges"]) == (len(found.nodes), len(found.edges)) == (nodes, edges)
    kinds = Counter(kind for _, kind in found.nodes(data="kind"))
    assert kinds - Counter(input=len(graph.inputs), output=len(graph.outputs)) == Counter(
        op.kind for op in graph.ops
    )
    assert networkx.is_directed_acyclic_graph(found)
    assert os.listdir(tmp_path) == ["out.graphml"]
    xml.etree.ElementTree.parse(out)


def test_a_node_says_what_it_is(plain: Staged, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.graphml"
    told(capsys, plain.path, "--graph", out)
    found = networkx.read_graphml(out)
    (up,) = [(node, data) for node, data in found.nodes(data=True)
             if data["layer"] == "model.layers.1" and data["shape"] == f"[T,{I}]"]  # fmt: skip
    node, data = up
    assert (data["kind"], data["dtype"], data["bytes"]) == ("linear", "f32", f"{4 * I}*T")
    assert data["weights"] == f"@model.layers.1.up.weight: f32[{I},{H}]"
    ((source, _, edge),) = found.in_edges(node, data=True)
    assert (edge["value"], edge["type"]) == (source, f"f32[T,{H}]")
    assert found.nodes[source]["kind"] == "rms_norm"


def test_dot_has_a_cluster_per_layer(
    mixed: Staged, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.dot"
    about = told(capsys, mixed.path, "--graph", out)
    text = out.read_text()
    assert text.count("subgraph ") == 4 and text.count('label="model.layers.') == 4
    assert text.count(" -> ") == about["edges"]
    # Quotes close where they opened: what is left of a line without its strings is DOT's own.
    strings = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    assert "img" not in strings and "onerror" not in strings and "onerror" in text
    assert strings.count("{") == strings.count("}") == 1 + text.count("subgraph ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--ir", "31"), "has no stage '31'; it has 00-imported, "),
        (("--ir", "dce"), "'dce' is 4 stages: 04-dce, 08-dce, 13-dce, 28-dce. Give a number."),
        (("--diff", "0", "nope"), "has no stage 'nope'"),
        (("--graph", "x.svg"), "x.svg: the file's name ends in '.svg'. Name it with .dot or .graphml."),
        (("--graph", "no/such/x.dot"), "there is no such directory"),
        (("--diff", "0", "1", "--memory"), "--memory and --diff: show different things. Give one of them."),
        (("--ir", "0", "--kernels"), "--ir: goes with --graph alone"),
    ],
)
def test_what_cannot_be_shown(
    plain: Staged, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    args: tuple[object, ...], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    code, out, err = octavo(capsys, plain.path, *args)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_without_stages_it_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write(tmp_path / "bare.octavo", imported([CAUSAL]), dump=False)
    code, _, err = octavo(capsys, bare.path, "--diff", "0", "graph")
    assert code == 2 and "has no stage '0'; it has graph. Compile the model with --dump-ir DIR" in err
    assert "Compile the model with --dump-ir DIR" in said(capsys, bare.path, "--stages")
    assert "--dump-ir" in " ".join(said(capsys, bare.path).split())


@pytest.mark.parametrize("options", [[], ["--ir", "9"]])
def test_reading_text_loads_nothing_heavy(plain: Staged, options: list[str]) -> None:
    code = (
        "import sys; from compiler.cli.main import main\n"
        f"try: main(['inspect', {str(plain.path)!r}, *{options!r}])\n"
        "except SystemExit as end: print('loaded:', end.code, *{name.split('.')[0] for name in sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    code, *loaded = said.rpartition("loaded: ")[2].split()
    assert code in ("0", "None") and "runtime" in loaded
    heavy = {"torch", "transformers", "sympy", "networkx", "onnx", "triton", "ml_dtypes", "ir"}
    assert not heavy & set(loaded)
