"""What the CPU's executor holds is what was planned, by hand and by the bytes of its arrays."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path

import pytest

import runtime
from runtime import ArtifactError, ResourceError, machine
from runtime.weights import Weights
from tests.codegen.test_cpu_executor import COMPILER, build
from tests.runtime import made

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

T, R, ROWS = 100, 5, 5 + 128  # ROWS: one of each request, and those to score
VOCAB, CONTEXT = 97, 256


def group(layers: int, heads: int, size: int, dtype: str, window: int | None, num_bytes: int) -> dict:
    per_token = 2 * layers * heads * size * num_bytes
    streams = [{"name": n, "dtype": dtype, "heads": heads, "head_size": size} for n in "kv"]
    return {
        "layers": layers, "window": window, "block": 16, "bytes_per_token": per_token,
        "block_bytes": 16 * per_token, "streams": streams,
    }  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    """A full group of 2 layers, 3 heads of 8, f32; a sliding one of 5 layers, 1 head of 24, bf16."""
    folder = tmp_path_factory.mktemp("memory")
    files = made.default_files(build(folder))
    groups = [group(2, 3, 8, "f32", None, 4), group(5, 1, 24, "bf16", 40, 2)]
    return made.write(folder / "two.octavo", files, made.manifest(files, kv_groups=groups))


def test_what_is_held_is_what_was_planned(artifact):
    options = dict(max_step_tokens=T, max_requests=R, kv_memory="300KiB", swap_memory="50KB")
    planned = runtime.plan(artifact, target="cpu", **options)
    with runtime.load(artifact, **options) as engine:
        memory, executor, buffers = engine.memory, engine._executor, engine._core._buffers
        assert memory.groups == planned.groups and memory.total_bytes == planned.total_bytes
        # 2 * 2 * 3 * 8 * 4 and 2 * 5 * 1 * 24 * 2 bytes of a token
        assert [g.bytes_per_token for g in memory.groups] == [384, 480]
        # a request of 256 tokens: 16 blocks of 6144 bytes; (40 + 100 + 14) // 16 + 1 = 10 of 7680: 175104
        assert memory.num_blocks == [16 * 307200 // 175104, 10 * 307200 // 175104] == [28, 17]
        assert [pool.nbytes for pool in executor._pools] == [28 * 6144, 17 * 7680]
        assert memory.kv_bytes == 28 * 6144 + 17 * 7680 <= 300 << 10
        assert [p.shape for p in executor._places] == [(3, 6144), (3, 7680)]  # 50000 // 13824
        assert memory.swap_bytes == 3 * 13824
        # 64 per token, 32 per request, 256 fixed; sizes are rounded up to 16
        assert memory.workspace.arena == 64 * 112 + 32 * 16 + 256 == executor._arena.nbytes
        assert memory.workspace.logits == ROWS * VOCAB * 4 == executor._logits.nbytes
        arrays = [buffers._ids, buffers._pos, buffers._starts, buffers._lens, buffers._rows, buffers._range]
        arrays += [*buffers._slots, *buffers._tables]
        assert memory.workspace.inputs == sum(array.nbytes for array in arrays)
        assert memory.weight_bytes == (artifact / "weights/cpu.safetensors").stat().st_size
        parts = memory.weight_bytes + memory.kv_bytes + memory.swap_bytes
        assert memory.total_bytes == parts + memory.workspace.total


@pytest.mark.parametrize(
    ("options", "todo"),
    [
        (dict(kv_blocks=10**6), "Lower kv_memory to .* or kv_blocks to "),
        (dict(kv_memory="20GB"), "Lower kv_memory to "),
        (dict(kv_blocks=1, swap_memory="20GB"), "Lower swap_memory, kv_memory, max_step_tokens"),
        (dict(kv_blocks=1, max_requests=2**20), "Lower kv_memory, max_step_tokens or max_requests"),
        (dict(max_step_tokens=2**20, max_requests=2**20), "Lower kv_memory, max_step_tokens or max_requests"),
    ],
)
def test_too_much_is_refused_before_anything_is_mapped(artifact, monkeypatch, options, todo):
    def refuse(*args, **more):
        raise AssertionError("memory was mapped")

    monkeypatch.setattr(machine, "free_memory", lambda: 10 << 20)
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ResourceError, match=f"10.0 MiB of memory free; this takes .*{todo}"):
        runtime.load(artifact, **options)
    assert runtime.plan(artifact, **options).refusal is not None


def test_what_a_refusal_says_to_lower_to_fits(artifact, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 10 << 20)
    with pytest.raises(ResourceError) as refused:
        runtime.load(artifact, kv_memory="20GB", max_requests=1000)
    most = int(refused.value.todo.split()[3])
    with runtime.load(artifact, kv_memory=most, max_requests=1000) as engine:
        assert 0 <= engine.memory.free_bytes - engine.memory.total_bytes < 2 * 13824
    with pytest.raises(ResourceError):
        runtime.load(artifact, kv_memory=most + 2 * 13824, max_requests=1000)


@pytest.mark.parametrize(("option", "percent"), [(None, 50), ("25%", 25), ("100%", 100)])
def test_a_share_is_of_what_all_else_leaves_free(artifact, monkeypatch, option, percent):
    """Swapped blocks too, which lie in the same memory."""
    monkeypatch.setattr(machine, "free_memory", lambda: 3 << 20)
    with runtime.load(artifact, kv_memory=option, max_requests=100, swap_memory="1MiB") as engine:
        memory = engine.memory
        left = (3 << 20) - memory.weight_bytes - memory.workspace.total - memory.swap_bytes
        assert 0 <= left * percent / 100 - memory.kv_bytes < 2 * 13824


def test_weights_are_copied_only_beside_what_is_planned(artifact, monkeypatch):
    """Four tenths of what is left must hold them; the blocks count, though none of them was touched."""
    size = (artifact / "weights/cpu.safetensors").stat().st_size
    wanted: list[bool] = []
    asked = Weights.deserve_copy
    monkeypatch.setattr(Weights, "deserve_copy", lambda self, taken: wanted.append(asked(self, taken)))
    monkeypatch.setattr(machine, "has_huge_pages", lambda: True)
    for spare in (size * 2, size * 3):
        held = runtime.plan(artifact, kv_blocks=50, max_requests=1)
        mapped = held.workspace.arena + held.workspace.logits + held.kv_bytes
        monkeypatch.setattr(machine, "free_memory", lambda free=mapped + spare: free)
        with pytest.MonkeyPatch.context() as unchecked:
            unchecked.setattr(runtime.MemoryPlan, "check", lambda self: None)
            runtime.load(artifact, kv_blocks=50, max_requests=1).close()
    assert wanted == [False, True]


def test_shapes_alone_are_planned_and_not_loaded(tmp_path):
    files = made.default_files()
    del files["weights/cpu.safetensors"]
    raw = made.manifest(files)
    raw["targets"]["cpu"]["weights"] = None
    root = made.write(tmp_path / "shapes.octavo", files, raw)
    plan = runtime.plan(root, kv_blocks=7)
    assert plan.weight_bytes is None and plan.kv_bytes == 7 * 2048
    assert plan.total_bytes == plan.workspace.total + plan.kv_bytes
    assert "unknown: the bytes of the weights" in plan.text() and plan.as_json()["weight_bytes"] is None
    with pytest.raises(ArtifactError, match="no weights"):
        runtime.load(root)


def test_no_weights_are_read_for_a_plan(artifact, tmp_path):
    """A file of the same size will do, whatever is in it."""
    root = Path(shutil.copytree(artifact, tmp_path / "copy.octavo"))
    size = (root / "weights/cpu.safetensors").stat().st_size
    (root / "weights/cpu.safetensors").write_bytes(b"x" * size)
    plan = runtime.plan(root, kv_blocks=7)
    assert plan.weight_bytes == size and plan.kv_bytes == 7 * 13824
    with pytest.raises(ArtifactError, match="SHA-256"):
        runtime.load(root)
