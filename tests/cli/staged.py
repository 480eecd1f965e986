"""Artifacts with every stage, of small models in text, lowered by the real passes; nothing is built."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from codegen.triton.build import BuiltKernel, kernels_json
from compiler import manifest
from compiler.artifact import ArtifactWriter
from compiler.cli.main import main
from compiler.pipeline import Stage, pipeline, run_pipeline
from compiler.targets import CpuTarget, GpuTarget, Target, find_targets
from ir.graph import Graph
from ir.text import parse, print_graph
from passes.plan_memory import PlanMemory

V, H, D, I = 37, 32, 16, 40  # noqa: E741
NORM = 6  # ops of a norm as it is imported
LAYER = 2 * NORM + 16  # and of a layer


def imported(masks: Sequence[str], layers: str = "model.layers", name: str = "small") -> str:
    """A decoder of len(masks) layers in the imported form. layers: the path of the modules that hold them."""
    body = [f"  %x = embed %ids, @embed: f32[{V},{H}] : f32[1,S,{H}] // model.embed"]
    x = "x"
    for n, mask in enumerate(masks):
        body += _layer(n, x, f"{layers}.{n}", mask)
        x = f"l{n}.out"
    body += _norm("last", x, "norm.weight", "model.norm")
    body.append(f"  %logits = linear %last.scaled, @embed: f32[{V},{H}] : f32[1,S,{V}] // lm_head")
    head = f"graph @{json.dumps(name)}(%ids: i32[1,S], %pos: i32[1,S]) dims {{S: 1..64}} {{"
    return "\n".join([head, *body, "  return %logits", "}"]) + "\n"


def _norm(name: str, x: str, weight: str, loc: str) -> list[str]:
    ops = [
        f"%{name}.pow = pow %{x}, 2.0 : f32[1,S,{H}]",
        f"%{name}.mean = mean %{name}.pow {{axes=[2], keepdims=true}} : f32[1,S,1]",
        f"%{name}.add = add %{name}.mean, 1e-05 : f32[1,S,1]",
        f"%{name}.rsqrt = rsqrt %{name}.add : f32[1,S,1]",
        f"%{name}.mul = mul %{x}, %{name}.rsqrt : f32[1,S,{H}]",
        f"%{name}.scaled = mul @{json.dumps(weight)}: f32[{H}], %{name}.mul : f32[1,S,{H}]",
    ]
    return [f"  {op} // {loc}" for op in ops]


def _layer(n: int, x: str, path: str, mask: str) -> list[str]:
    heads, at = H // D, json.dumps(path)[1:-1]  # as a loc has it
    p, split = f"l{n}", f"f32[1,{H // D},S,{D}] // {at}"
    rows = f"f32[1,S,{heads},{D}] // {at}"
    ops = _norm(f"{p}.norm1", x, f"{path}.norm1.weight", f"{at}.norm1")
    for name in "qkv":
        weight = json.dumps(f"{path}.{name}.weight")
        ops += [
            f"  %{p}.{name} = linear %{p}.norm1.scaled, @{weight}: f32[{H},{H}] "
            f": f32[1,S,{H}] // {at}.{name}",
            f"  %{p}.{name}r = reshape %{p}.{name} {{shape=[1, S, {heads}, {D}]}} : {rows}",
            f"  %{p}.{name}t = transpose %{p}.{name}r {{perm=[0, 2, 1, 3]}} : {split}",
        ]
    ops += [
        f"  %{p}.o = attention %{p}.qt, %{p}.kt, %{p}.vt {{scale=0.25, mask={mask}}} : {rows}",
        f"  %{p}.or = reshape %{p}.o {{shape=[1, S, {H}]}} : f32[1,S,{H}] // {at}",
        f"  %{p}.mid = add %{x}, %{p}.or : f32[1,S,{H}] // {at}",
    ]
    ops += _norm(f"{p}.norm2", f"{p}.mid", f"{path}.norm2.weight", f"{at}.norm2")
    up, down = (json.dumps(f"{path}.{name}.weight") for name in ("up", "down"))
    return ops + [
        f"  %{p}.up = linear %{p}.norm2.scaled, @{up}: f32[{I},{H}] : f32[1,S,{I}] // {at}.up",
        f"  %{p}.act = silu %{p}.up : f32[1,S,{I}] // {at}.act",
        f"  %{p}.down = linear %{p}.act, @{down}: f32[{H},{I}] : f32[1,S,{H}] // {at}.down",
        f"  %{p}.out = add %{p}.mid, %{p}.down : f32[1,S,{H}] // {at}",
    ]


class UnbuiltCpu(CpuTarget):
    def build(self, *_: Any) -> None:
        self._kernels = []


class UnbuiltGpu(GpuTarget):
    """With made-up resources in place of binaries."""

    def build(self, writer: ArtifactWriter, *_: Any) -> None:
        taken: dict[str, Any] = {"registers": 40, "spills": 0, "occupancy": 0.75, "matrix": {"mma": 2}}
        built = [BuiltKernel(k, k.function, None, 1024, **taken) for k in self.generated.kernels]
        writer.write(f"{self.folder}/kernels.json", json.dumps(kernels_json(built, self._device)))


@dataclass(frozen=True)
class Staged:
    """An artifact, and the graph of each stage as the passes left it, by name."""

    path: Path
    graphs: dict[str, Graph]


def write(path: Path, text: str, targets: Sequence[str] = ("cpu",), dump: bool = True) -> Staged:
    made = [UnbuiltCpu(["baseline"]) if name == "cpu" else find_targets(name)[0] for name in targets]
    for target in made:
        if isinstance(target, GpuTarget):
            target.__class__ = UnbuiltGpu
    passes = pipeline(devices=dict.fromkeys(target.device for target in made))
    graphs: dict[str, Graph] = {}
    lowered: dict[str, Graph] = {}

    def keep(stage: Stage) -> None:
        graphs[f"{stage.index:02}-{stage.name}"] = stage.graph
        if stage.index and isinstance(ran := passes[stage.index - 1], PlanMemory):
            lowered[ran.device] = stage.graph

    run_pipeline(parse(text), passes, keep)
    with ArtifactWriter(path) as writer:
        for name, graph in graphs.items() if dump else ():
            writer.write(f"stages/{name}.ir", print_graph(graph))
        _seal(writer, made, lowered)
        return Staged(writer.publish(), graphs)


def _seal(writer: ArtifactWriter, made: Sequence[Target], lowered: dict[str, Graph]) -> None:
    for target in made:
        target.write_graph(lowered[target.device], writer)
        target.generate(lowered[target.device], writer)
        target.build(writer, lambda done, total: None, None)  # pyright: ignore[reportArgumentType]
    graph = next(iter(lowered.values()))
    model = {"dtype": "f32", "vocab_size": V, "max_context": 64, "bos_token_id": None, "eos_token_ids": []}
    writer.seal({
        "name": graph.name, "made_by": {"octavo": "test"},
        "source": {"kind": "graph", "path": "test", "files": {}}, "model": {**model, "frozen": {}},
        "tokenizer": manifest.tokenizer_entry({}), "kv_groups": manifest.kv_groups(graph),
        "targets": {target.name: target.entry(weights=False) for target in made},
    })  # fmt: skip


def octavo(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["inspect", *map(str, args)])
    return int(end.value.code or 0), *capsys.readouterr()
