"""Packed weights: layouts, alignment, weight ops, and memory that stays near one chunk of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from codegen.cpp.pack import pack_weights
from codegen.cpp.weights import PackedWeight
from ir.build import GraphBuilder
from ir.graph import Graph, Scalar, Value, Weight
from ir.types import DType
from tests.codegen.harness import Arrays, weight

ROWS, K = 45, 7


def packed(
    graph: Graph, arrays: dict[str, np.ndarray], order: list[PackedWeight], path: Path
) -> dict[str, np.ndarray]:
    pack_weights(graph, order, Arrays(arrays), path, lambda done, total: None)
    with safe_open(path, "numpy") as file:
        return {w.name: file.get_tensor(w.name) for w in order}


def plan(arg: Weight | Value, layout: str, dtype: DType = DType.F32) -> PackedWeight:
    shape = tuple(int(d) for d in arg.type.shape)  # type: ignore[union-attr]
    return PackedWeight(f"{arg.name}.{layout}", arg, layout, dtype, shape)


def rows_of(panels: np.ndarray) -> np.ndarray:
    """[N, K] of panels [N/16, K, 16] or, of pairs, [N/16, K/2, 16, 2]; what fills them up is included."""
    rows = panels.swapaxes(1, 2)
    return rows.reshape(-1, int(np.prod(rows.shape[2:])))


def test_layouts(tmp_path: Path) -> None:
    a = np.random.default_rng(0).standard_normal((ROWS, K)).astype(np.float32)
    b = np.random.default_rng(1).standard_normal((2 * 20, K)).astype(np.float32)
    graph = GraphBuilder("g", {}).graph([])
    order = [
        plan(weight("a", ROWS, K), "panels"),
        plan(weight("b", 40, K), "paired"),
        plan(weight("a", ROWS, K), "plain"),
    ]
    found = packed(graph, {"a": a, "b": b}, order, tmp_path / "w")
    assert (
        np.array_equal(rows_of(found["a.panels"])[:ROWS], a) and not rows_of(found["a.panels"])[ROWS:].any()
    )
    pairs = found["b.paired"]
    assert pairs.shape == (4, K, 16)
    assert np.array_equal(rows_of(pairs[0::2])[:20], b[:20]) and np.array_equal(
        rows_of(pairs[1::2])[:20], b[20:]
    )
    assert np.array_equal(found["a.plain"], a)


def test_every_tensor_is_on_a_64_byte_boundary(tmp_path: Path) -> None:
    order = [plan(weight(f"w{n}", n), "plain") for n in (1, 5, 16, 33)]
    packed(
        GraphBuilder("g", {}).graph([]),
        {f"w{n}": np.ones(n, np.float32) for n in (1, 5, 16, 33)},
        order,
        tmp_path / "w",
    )
    raw = (tmp_path / "w").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert all((8 + length + header[w.name]["data_offsets"][0]) % 64 == 0 for w in order)


def test_a_weight_may_have_any_name(tmp_path: Path) -> None:
    """Even that of what fills the gaps."""
    arrays = {name: np.full(5, n, np.float32) for n, name in enumerate(("a", "filler.20.plain", "filler.84"))}
    order = [
        PackedWeight(name, weight(name, 5), "plain", DType.F32, (5,))
        for name in ("a", "filler.20.plain", "filler.84")
    ]
    order.insert(0, PackedWeight("filler.20", weight("a", 5), "plain", DType.F32, (5,)))
    found = packed(GraphBuilder("g", {}).graph([]), arrays, order, tmp_path / "w")
    for name in arrays:
        assert np.array_equal(found[name], arrays[name])
    assert np.array_equal(found["filler.20"], arrays["a"])


@pytest.mark.parametrize("chunk", [1, 100, 10**9])
def test_weight_ops_by_rows_are_the_whole_op(tmp_path: Path, chunk: int) -> None:
    rng = np.random.default_rng(2)
    arrays = {n: rng.standard_normal((r, K)).astype(np.float32) for n, r in (("a", 30), ("b", 21), ("t", K))}
    arrays["t"] = rng.standard_normal((K, 9)).astype(np.float32)
    arrays["row"] = rng.standard_normal(K).astype(np.float32)
    b = GraphBuilder("g", {})
    joined = b.op(
        "concat", weight("a", 30, K), b.op("slice", weight("b", 21, K), axis=0, start=3, stop=20), axis=0
    )
    scaled = b.op("add", b.op("mul", joined, Scalar(1.5)), weight("row", K))
    first, second = b.op("split", scaled, axis=0, sizes=(28, 19), several=True)
    narrow = b.op("cast", second, dtype="bf16")
    turned = b.op("reshape", b.op("transpose", weight("t", K, 9), perm=(1, 0)), shape=(9, K, 1))
    graph = b.graph([first, narrow, turned])
    order = [plan(first, "panels"), plan(narrow, "panels", DType.BF16), plan(turned, "plain")]
    pack_weights(graph, order, Arrays(arrays), tmp_path / "w", lambda done, total: None, chunk)
    want = np.concatenate([arrays["a"], arrays["b"][3:20]]) * np.float32(1.5) + arrays["row"]
    with safe_open(tmp_path / "w", "numpy") as file:
        assert np.array_equal(rows_of(file.get_tensor(order[0].name))[:28], want[:28])
        bits = rows_of(file.get_tensor(order[1].name).view(np.uint16))
        assert np.array_equal(file.get_tensor(order[2].name), arrays["t"].T.reshape(9, K, 1))
    assert bits.shape == (32, K + 1) and not bits[19:].any() and not bits[:, K:].any()
    assert np.array_equal(bits[:19, :K], want[28:].astype(DType.BF16.numpy).view(np.uint16))


class Counting(Arrays):
    """Knows how many rows were read at once at most."""

    most = 0

    def rows(self, name: str, lo: int, hi: int) -> np.ndarray:
        self.most = max(self.most, hi - lo)
        return super().rows(name, lo, hi)

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read whole")


@pytest.mark.parametrize("chunk", [1, 1500, 10**9])
@pytest.mark.parametrize("layout", ["panels", "paired"])
def test_stacked_matrices_are_packed_an_expert_at_a_time(tmp_path: Path, layout: str, chunk: int) -> None:
    """[E,K,N] weights, as some checkpoints have them: their transposes stacked, [E*N,K]."""
    experts, n = 5, 2 * 23
    array = np.random.default_rng().standard_normal((experts, K, n)).astype(np.float32)
    b = GraphBuilder("g", {})
    turned = b.op("transpose", weight("w", experts, K, n), perm=(0, 2, 1))
    stacked = b.op("reshape", turned, shape=(experts * n, K))
    order = [PackedWeight("w", stacked, layout, DType.F32, (experts * n, K), experts=experts)]
    reader = Counting({"w": array})
    pack_weights(b.graph([stacked]), order, reader, tmp_path / "w", lambda done, total: None, chunk)
    with safe_open(tmp_path / "w", "numpy") as file:
        found = file.get_tensor("w").reshape(experts, -1, K, 16)
    for panels, matrix in zip(found, array, strict=True):
        if layout == "panels":
            assert np.array_equal(rows_of(panels)[:n], matrix.T) and not rows_of(panels)[n:].any()
        else:
            halves = np.split(matrix.T, 2)
            assert all(np.array_equal(rows_of(panels[h::2])[:23], halves[h]) for h in range(2))
    assert reader.most == 1


MEASURE = """
import resource, sys
from pathlib import Path
import numpy as np
from codegen.cpp.pack import pack_weights
from codegen.cpp.weights import PackedWeight
from ir.build import GraphBuilder
from ir.graph import Scalar, Weight
from ir.types import DType, Tensor

N, K = 40000, 1024  # 164 MB

class Source:
    def rows(self, name, lo, hi):
        return np.ones((hi - lo, K), np.float32)

w = Weight("w", Tensor(DType.F32, (N, K)))
b = GraphBuilder("g", {})
v = b.op("mul", b.op("concat", w, w, axis=0), Scalar(2.0))
order = [PackedWeight("v", v, "panels", DType.F32, (2 * N, K))]

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(next(l for l in text.splitlines() if l.startswith("RssAnon")).split()[1]) * 1024

start, most = anonymous(), 0
import threading, time
stop = threading.Event()
def watch():
    global most
    while not stop.is_set():
        most = max(most, anonymous()); time.sleep(0.002)
t = threading.Thread(target=watch); t.start()
pack_weights(b.graph([v]), order, Source(), Path(sys.argv[1]), lambda d, n: None)
stop.set(); t.join()
print(most - start)
"""


def test_packing_holds_a_few_chunks_and_not_the_tensor(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "w")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 120e6
