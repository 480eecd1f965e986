"""Compiles a lowered graph and runs it through the C ABI, with poisoned memory, beside the interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codegen import cpp
from codegen.kv_block import block_bytes, keys_in_lanes, stream_offsets
from ir.build import GraphBuilder
from ir.dims import Bounds, symbol
from ir.graph import Graph, Value, Weight
from ir.interpret import empty_kv, interpret
from ir.text import parse
from ir.types import KV, DType, Tensor
from ir.verify import verify
from passes.group_pointwise import GroupPointwise
from passes.plan_memory import PlanMemory

Array = np.ndarray[Any, np.dtype[Any]]


class KVGroup(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("slots", ctypes.c_void_p), ("table", ctypes.c_void_p),
                ("table_stride", ctypes.c_int64)]  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("num_tokens", "num_requests", "num_rows", "num_groups")] + [
        (n, ctypes.c_void_p) for n in ("ids", "pos", "starts", "lens", "rows", "groups", "arena", "logits")
    ]


class Arrays:
    """A weight reader over arrays in memory."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self.arrays[name][lo:hi]

    def read(self, name: str) -> Array:
        return self.arrays[name]


def best_level() -> str:
    """The first ISA level that this machine has."""
    return levels()[0]


def levels() -> list[str]:
    """Every ISA level that is built for some graph and that this machine has."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return [n for n in cpp.default_levels(bf16=True, int8=True) if set(level(n).features) <= flags]


def level(name: str) -> Any:
    return next(level for level in cpp.LEVELS if level.name == name)


def lower(text: str | Graph, device: str = "cpu") -> Graph:
    graph = parse(text) if isinstance(text, str) else text
    verify(graph)
    for step in (GroupPointwise(), PlanMemory(device)):
        graph = step.run(graph).graph
        verify(graph)
    return graph


def random_weights(graph: Graph, rng: np.random.Generator, scale: float = 0.3) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for weight in graph.weights:
        assert isinstance(weight.type, Tensor)
        shape = tuple(int(d) for d in weight.type.shape)
        dtype = weight.type.dtype
        if dtype.is_float:
            found[weight.name] = (rng.standard_normal(shape) * scale).astype(np.float32).astype(dtype.numpy)
        else:
            found[weight.name] = rng.integers(0, 2, shape).astype(dtype.numpy)
    return found


def paged_builder(*states: KV, context: int = 1024) -> tuple[GraphBuilder, list[Value]]:
    """A builder with the inputs of a paged graph. Returns the KV inputs too."""
    dims: dict[str, Bounds] = {"T": (1, None), "R": (1, None), "Q": (1, None)}
    dims |= {f"M{g}": (1, -(-context // kv.block)) for g, kv in enumerate(states)}
    b = GraphBuilder("test", dims)
    vector = lambda name, size: b.input(name, Tensor(DType.I32, (size,)))  # noqa: E731
    t, r = symbol("T"), symbol("R")
    for name, size in (("ids", t), ("pos", t), ("lens", r), ("starts", r + 1), ("rows", symbol("Q"))):
        vector(name, size)
    found = []
    for g, kv in enumerate(states):
        found.append(b.input(f"kv{g}", kv))
        vector(f"slots{g}", t)
        b.input(f"table{g}", Tensor(DType.I32, (r, symbol(f"M{g}"))))
    return b, found


def arg(b: GraphBuilder, name: str) -> Value:
    """A graph input by name."""
    return next(v for v in b.inputs if v.name == name)


def weight(name: str, *shape: int, dtype: DType = DType.F32) -> Weight:
    return Weight(name, Tensor(dtype, shape))


def aligned(count: int, dtype: Any, fill: Any) -> Array:
    """An array on a 64-byte boundary."""
    dtype = np.dtype(dtype)
    raw = np.empty(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + count * dtype.itemsize].view(dtype)
    array[...] = fill
    return array


def pointer(array: Array) -> int:
    return array.ctypes.data


@dataclass
class Chunk:
    """One request's part of a step: its block table, how many tokens came before, its new token ids."""

    table: Sequence[int]
    before: int
    ids: Sequence[int]

    def blocks(self, size: int) -> Sequence[int]:
        """The table of a group whose blocks are of `size` tokens; here of the only size that there is."""
        return self.table


class Model:
    """A compiled graph, its packed weights and a poisoned cache."""

    def __init__(self, text: str | Graph, weights: Mapping[str, Array] | None, directory: Path,
                 isa: str | None = None, seed: int = 0) -> None:  # fmt: skip
        self.graph = lower(text)
        rng = np.random.default_rng(seed)
        self.weights = dict(weights) if weights is not None else random_weights(self.graph, rng)
        self.generated = cpp.generate(self.graph)
        for name, text in self.generated.sources.items():
            (directory / name).write_text(text)
        cpp.pack(self.generated, Arrays(self.weights), directory / "w.safetensors")
        (self.kernel,) = cpp.build(directory, [isa or best_level()])
        self.library = ctypes.CDLL(str(directory / self.kernel.file))
        self.library.octavo_open.restype = ctypes.c_void_p
        self.library.octavo_open.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        self.library.octavo_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.library.octavo_close.argtypes = [ctypes.c_void_p]
        self.library.octavo_copy_blocks.argtypes = [
            ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]  # fmt: skip
        self.packed = load_packed(directory / "w.safetensors")
        self._order = (ctypes.c_void_p * len(self.generated.weight_order))(
            *(pointer(self.packed[name]) for name in self.generated.weight_order)
        )
        self.states = [v.type for v in self.graph.inputs if isinstance(v.type, KV)]

    def open(self, threads: int) -> int:
        engine = self.library.octavo_open(self._order, len(self._order), threads)
        assert engine
        return engine

    def cache(self, blocks: int) -> list[Array]:
        """Poisoned: every element is NaN (all bits set)."""
        return [aligned(blocks * block_bytes(kv), np.uint8, 255) for kv in self.states]

    def arena_bytes(self, t: int, r: int, q: int) -> int:
        plan = self.generated.plan["arena"]
        up = lambda n: (n + 15) // 16 * 16  # noqa: E731
        return plan["T"] * up(t) + plan["R"] * up(r) + plan["Q"] * up(q) + plan[""]

    def step(
        self,
        engine: int,
        cache: list[Array],
        chunks: Sequence[Chunk],
        rows: Sequence[int] | None = None,
        stride: int = 64,
    ) -> Array:
        """One forward. Returns the logits of `rows` (all tokens by default)."""
        groups = [pack_step(chunks, stride, kv.block, kv.tail) for kv in self.states]
        packed = groups[0] if groups else pack_step(chunks, stride)
        rows_array = np.asarray(range(len(packed["ids"])) if rows is None else rows, np.int32)
        width = self.generated.plan["max_logits_width"]
        logits = aligned(len(rows_array) * width, np.float32, np.nan)
        size = self.arena_bytes(len(packed["ids"]), len(chunks), len(rows_array))
        arena = aligned(size + 64, np.uint8, 255)
        pools = (KVGroup * max(1, len(cache)))(
            *(
                KVGroup(pointer(c), pointer(g["slots"]), pointer(g["table"]), stride)
                for c, g in zip(cache, groups, strict=True)
            )
        )
        step = Step(len(packed["ids"]), len(chunks), len(rows_array), len(cache),
                    *(pointer(packed[n]) for n in ("ids", "pos", "starts", "lens")), pointer(rows_array),
                    ctypes.addressof(pools), pointer(arena), pointer(logits))  # fmt: skip
        assert self.library.octavo_forward(engine, ctypes.byref(step)) == 0
        assert (arena[size:] == 255).all(), "wrote past the arena"
        return logits.reshape(len(rows_array), width)

    def decode_cache(self, cache: Array, group: int, blocks: int) -> dict[str, Array]:
        """The cache as the interpreter keeps it: stream -> [layers, blocks, block, heads, head_size]."""
        kv = self.states[group]
        offsets, layer_bytes = stream_offsets(kv)
        raw = cache.reshape(blocks, -1)
        found: dict[str, Array] = {}
        for index, (s, offset) in enumerate(zip(kv.streams, offsets, strict=True)):
            layers = []
            for layer in range(kv.layers):
                start = layer * layer_bytes + offset
                part = raw[:, start : start + s.bytes_per_block(kv.block)].copy().view(s.dtype.numpy)
                if s.per_block:
                    part = part.reshape(blocks, s.heads, s.head_size)
                elif keys_in_lanes(kv, index):
                    part = part.reshape(blocks, s.heads, s.head_size, kv.block).transpose(0, 3, 1, 2)
                else:
                    part = part.reshape(blocks, s.heads, kv.block, s.head_size).transpose(0, 2, 1, 3)
                layers.append(part)
            found[s.name] = np.stack(layers)
        return found


def pack_step(chunks: Sequence[Chunk], stride: int, block: int = 16, tail: bool = False) -> dict[str, Array]:
    """The step's arrays, as docs/artifact.md defines them, with the slots and the table of one group.

    tail: only the blocks that the step's tokens lie in have entries.
    """
    ids = np.concatenate([np.asarray(c.ids, np.int32) for c in chunks])
    pos = np.concatenate([np.arange(c.before, c.before + len(c.ids)) for c in chunks]).astype(np.int32)
    tables = [c.blocks(block) for c in chunks]
    slots = np.concatenate(
        [
            [blocks[p // block] * block + p % block for p in range(c.before, c.before + len(c.ids))]
            for c, blocks in zip(chunks, tables, strict=True)
        ]
    ).astype(np.int32)
    table = np.full((len(chunks), stride), -(1 << 30), np.int32)
    for row, blocks, c in zip(table, tables, chunks, strict=True):
        live = c.before // block if tail else 0
        row[live : len(blocks)] = blocks[live:]
    starts = np.concatenate([[0], np.cumsum([len(c.ids) for c in chunks])]).astype(np.int32)
    lens = np.asarray([c.before + len(c.ids) for c in chunks], np.int32)
    return {"ids": ids, "pos": pos, "slots": slots, "table": table, "starts": starts, "lens": lens}


def load_packed(path: Path) -> dict[str, Array]:
    """The packed file, memory-mapped by hand: alignment is part of what is tested."""
    import json

    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + length].tobytes())
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not name.startswith("filler."):
            assert (8 + length + begin) % 64 == 0
        found[name] = data[8 + length + begin : 8 + length + end]
    return found


def reference_step(
    graph: Graph,
    weights: Mapping[str, Array],
    states: list[dict[str, Array]],
    chunks: Sequence[Chunk],
    rows: Sequence[int] | None = None,
) -> tuple[Array, list[dict[str, Array]]]:
    """The same step by the interpreter in float64; the states are those after it."""
    packed = pack_step(chunks, max(len(c.blocks(16)) for c in chunks))
    inputs: dict[str, Any] = {n: packed[n] for n in ("ids", "pos", "lens", "starts")}
    inputs["rows"] = np.asarray(range(len(packed["ids"])) if rows is None else rows, np.int32)
    for g, (value, state) in enumerate(
        zip([v for v in graph.inputs if isinstance(v.type, KV)], states, strict=True)
    ):
        assert isinstance(value.type, KV)
        block = value.type.block
        packed = pack_step(chunks, max(len(c.blocks(block)) for c in chunks), block)
        inputs[value.name] = state
        inputs[f"slots{g}"], inputs[f"table{g}"] = packed["slots"], np.maximum(packed["table"], 0)
    run = interpret(graph, inputs, weights, np.float64)
    return run.outputs[0], list(run.outputs[1:])


def empty_states(graph: Graph, blocks: int) -> list[dict[str, Array]]:
    """Poisoned float64 states."""
    found = []
    for value in graph.inputs:
        if isinstance(value.type, KV):
            state = empty_kv(value.type, blocks)
            found.append({n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in state.items()})
    return found


def build_cpp(source: str, directory: Path, isa: str | None = None) -> ctypes.CDLL:
    """A library from a test's own source that includes the kernel headers."""
    for header in cpp.INCLUDE.glob("*.h"):
        (directory / header.name).write_bytes(header.read_bytes())
    (directory / "forward.cpp").write_text(source)
    (kernel,) = cpp.build(directory, [isa or best_level()])
    return ctypes.CDLL(str(directory / kernel.file))
