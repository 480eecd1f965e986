"""Artifacts: manifest, plans, weights, graphs and links, up to where their code would be loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import runtime
from compiler.cli.inspect import summary
from runtime.artifact import Artifact
from runtime.cpu.plan import Plan as CpuPlan
from runtime.gpu.kernels import parse_kernels
from runtime.gpu.plan import Plan
from runtime.limits import Limits
from runtime.manifest import CpuTarget
from runtime.tokenizer import Tokenizer
from runtime.weights import Weights, tensor_bytes
from tests.fuzz import mutate
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.safetensors_files import header
from tests.runtime import made

WEIGHTS = "weights/cpu.safetensors"
LAUNCH = {
    "kernel": "linear.0",
    "grid": [["cdiv", "T", 16], 36],
    "args": [
        {"buffer": 0, "offset": ["*", "T", 4]},
        {"weight": 1},
        {"input": "ids"},
        {"size": ["min", "T", 3]},
    ],
}
PLAN = {
    "buffers": [{"T": 2304, "R": 0, "Q": 0, "": 0}, {"": 64}],
    "sample_scratch": {"Q": 13312, "": 0},
    "sections": {
        "forward": [
            {
                "op": "linear",
                "loc": "model.layers.0",
                "cases": [{"when": ["T", 16], "launches": [LAUNCH]}, {"when": None, "launches": []}],
            }
        ],
        "sample": [],
    },
}
KERNELS = {
    "source": "kernels/kernels.py",
    "kernels": [
        {
            "name": "norm.0",
            "function": "norm",
            "symbol": "norm",
            "signature": [["x", "*bf16"], ["n", "i32"]],
            "constants": [["BLOCK_M", 16], ["EPS", 1e-5], ["KIND", "a"]],
            "aligned": ["x"],
            "num_warps": 4,
            "num_stages": 2,
            "file": "kernels/norm.0.cubin",
            "shared_bytes": 0,
            "scratch_bytes": 0,
            "profile_scratch_bytes": 0,
        }
    ],
}


def make_artifact(rng: Random, folder: Path) -> None:
    """Signed again after the mutation, as whoever means harm would."""
    files = made.default_files()
    files["tokenizer/tokenizer_config.json"] = b'{"chat_template": "{{ messages }}"}'
    raw = made.with_gpu(files, rng.choice(("weights/gpu.safetensors", WEIGHTS, None)))
    raw["tokenizer"] = {"present": True, "files": ["tokenizer/tokenizer_config.json"]}
    kinds = (_mutate_manifest, _mutate_manifest, _mutate_plan, _name_paths, _bytes)
    kind = rng.choice(kinds)
    raw = kind(rng, raw, files) if rng.random() < 0.95 else raw
    try:
        made.write(folder / "a.octavo", files, raw)
        sealed = isinstance(raw, dict) and rng.random() < 0.9
    except (TypeError, ValueError, AttributeError, RecursionError):
        sealed = False
    if not sealed:
        (folder / "a.octavo/manifest.json").write_bytes(mutate.raw_json(rng, raw))
    if rng.random() < 0.1:
        name = rng.choice([*files, "manifest.json"])
        mutate.replace_by_link(rng, folder / "a.octavo" / name, folder.parent / "outside")
    elif rng.random() < 0.05:
        shutil.rmtree(folder.parent / "outside/weights", ignore_errors=True)
        (folder / "a.octavo/weights").rename(folder.parent / "outside/weights")
        (folder / "a.octavo/weights").symlink_to(folder.parent / "outside/weights")


def _mutate_manifest(rng: Random, raw: Any, files: dict[str, bytes]) -> Any:
    return mutate.mutated(rng, raw)


def _mutate_plan(rng: Random, raw: Any, files: dict[str, bytes]) -> Any:
    plan = mutate.mutated(rng, json.loads(files["targets/cpu/plan.json"]))
    return _with(raw, files, "targets/cpu/plan.json", mutate.raw_json(rng, plan))


def _bytes(rng: Random, raw: Any, files: dict[str, bytes]) -> Any:
    name = rng.choice([*files])
    return _with(raw, files, name, mutate.flipped(rng, files[name]))


def _with(raw: Any, files: dict[str, bytes], name: str, data: bytes) -> Any:
    files[name] = data
    raw["files"][name] = {"bytes": len(data), "sha256": made.chunked_sha256(data)}
    return raw


def _name_paths(rng: Random, raw: Any, files: dict[str, bytes]) -> Any:
    """A path that the manifest names leads elsewhere."""
    path = rng.choice(
        (*mutate.TEXTS, "weights/../../outside/secret", "weights", "", "manifest.json", "a" * 1100)
    )
    place = rng.choice((raw["targets"]["cpu"], raw["targets"]["cuda:sm_90"]))
    place[rng.choice(("graph", "plan", "weights"))] = path
    if rng.random() < 0.5:
        raw["files"][path] = raw["files"][WEIGHTS]
    if rng.random() < 0.2:
        raw["tokenizer"]["files"] = [path, "targets/cpu/graph.ir"]
    return raw


def open_artifact(folder: Path) -> str:
    """All that `inspect` and a load do before code runs."""
    artifact = Artifact.open(folder / "a.octavo")
    json.dumps(summary(artifact))
    Tokenizer.of(artifact)
    limits, reached = Limits(512, 64, 64), []
    for name, target in artifact.manifest.targets.items():
        artifact.read(target.graph)
        if isinstance(target, CpuTarget):
            assert CpuPlan.parse(artifact.read(target.plan), target.plan).arena_bytes(limits) >= 0
        if target.weights is not None:
            _map(artifact.path(artifact.weights(name)), target.weight_order)
        reached.append(name)
    _plan_memory(folder / "a.octavo")
    return f"opened with {len(reached)} targets"


def _plan_memory(path: Path) -> None:
    for options in ({}, {"kv_memory": "1GiB"}, {"kv_blocks": 100}):
        json.dumps(runtime.plan(path, target="cpu", **options).as_json([100]))


def _map(path: Path, order: tuple[str, ...]) -> None:
    """Each tensor's address holds its bytes."""
    weights = Weights(path, order)
    try:
        assert [t.size for t in weights.tensors] == tensor_bytes(path, order)
        assert all(address % 64 == 0 for address in weights.addresses)
        for tensor in weights.tensors:
            tensor.tobytes()
    finally:
        weights.close()


def make_weights(rng: Random, folder: Path) -> None:
    names = [f"w{i}" for i in range(rng.randrange(1, 4))]
    tree, size = header(rng, names)
    for name in names:
        if tree[name]["dtype"] == "F8_E4M3" and rng.random() < 0.9:
            tree[name]["dtype"] = "U8"
    if rng.random() < 0.7:
        tree = mutate.mutated(rng, tree)
    text = mutate.raw_json(rng, tree)
    length = len(text) if rng.random() < 0.9 else mutate.integer(rng) % 2**64
    data = length.to_bytes(8, "little") + text + rng.randbytes(size)
    (folder / "order.json").write_text(json.dumps(names))
    (folder / "w.safetensors").write_bytes(mutate.flipped(rng, data) if rng.random() < 0.1 else data)


def map_weights(folder: Path) -> str:
    _map(folder / "w.safetensors", tuple(json.loads((folder / "order.json").read_text())))
    return "mapped"


def make_gpu(rng: Random, folder: Path) -> None:
    plan = mutate.mutated(rng, PLAN) if rng.random() < 0.7 else PLAN
    kernels = mutate.mutated(rng, KERNELS) if plan is PLAN else KERNELS
    if rng.random() < 0.2:
        plan = {**PLAN, "buffers": [{"T": _expression(rng, 30)}], "sections": {"forward": [_entry(rng)]}}
    (folder / "plan.json").write_bytes(mutate.raw_json(rng, plan))
    (folder / "kernels.json").write_bytes(mutate.raw_json(rng, kernels))


def _entry(rng: Random) -> Any:
    launch = {**LAUNCH, "grid": [_expression(rng, 20)], "args": [{"size": _expression(rng, 14)}]}
    return {"op": "x", "loc": "", "cases": [{"when": None, "launches": [launch] * rng.choice((1, 5000))}]}


def _expression(rng: Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.05:
        return rng.choice(("T", "R", "Q", "M0", "x", mutate.integer(rng)))
    operator = rng.choice(("+", "*", "*", "-", "//", "cdiv", "min", "max", "**", "eval"))
    right = rng.choice((2, mutate.integer(rng), "T"))
    return [operator, _expression(rng, depth - 1), right]


def read_gpu(folder: Path) -> str:
    plan = Plan.parse((folder / "plan.json").read_bytes(), "plan.json")
    assert all(type(n) is int for n in plan.buffer_bytes(512, 64, 64))
    specs = parse_kernels((folder / "kernels.json").read_bytes(), "kernels.json", lambda name: b"")
    return f"read, {'with' if specs else 'without'} kernels"


_RUNTIME = ("runtime/artifact.py", "runtime/manifest.py", "runtime/cpu/plan.py", "runtime/hashes.py")
FUZZERS = (
    Fuzzer("artifact", make_artifact, open_artifact, _RUNTIME),
    Fuzzer("weights", make_weights, map_weights, ("runtime/weights.py",)),
    Fuzzer("gpu", make_gpu, read_gpu, ("runtime/gpu/plan.py", "runtime/gpu/kernels.py")),
)
