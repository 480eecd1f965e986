"""Runs a lowered graph's Triton kernels in the interpreter, with poisoned memory, beside the reference.

The counterpart of tests/codegen/harness.py, whose steps and references it shares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codegen import triton
from codegen.evaluate import Evaluator
from codegen.kv_block import block_bytes
from ir.graph import Graph
from ir.types import KV, Stream
from runtime.gpu.device import KernelSpec
from runtime.gpu.interpret import InterpretedDevice
from runtime.gpu.plan import Launch, Plan, evaluate
from tests.codegen.harness import Array, Arrays, Chunk, aligned, lower, pack_step, random_weights

GUARD = 256  # bytes around every buffer that nothing may touch


class Kernels:
    """A generated module loaded into the interpreter: launches by operands' addresses."""

    def __init__(self, generated: triton.Generated, directory: Path) -> None:
        source = directory / "kernels.py"
        source.write_text(generated.source)
        self.device = InterpretedDevice(source)
        specs = [
            KernelSpec(k.name, k.function, k.function, k.signature, k.constants, k.num_warps, 0, None)
            for k in generated.kernels
        ]
        self.handles = dict(zip((s.name for s in specs), self.device.load(specs), strict=True))
        self.plan = Plan.parse(json.dumps(generated.plan).encode(), "plan.json")

    def run(
        self, section: str, sizes: Mapping[str, int], inputs: Mapping[str, Array], weights: Sequence[Array]
    ) -> None:
        """Run a section's launches over a poisoned arena; raises AssertionError if one wrote outside it."""
        buffers = [
            aligned(size + 2 * GUARD, np.uint8, 255)
            for size in self.plan.buffer_bytes(sizes.get("T", 0), sizes.get("R", 0), sizes.get("Q", 0))
        ]
        for entry in self.plan.sections[section]:
            for launch in entry.choose(sizes):
                self._launch(launch, sizes, inputs, weights, buffers)
        for index, buffer in enumerate(buffers):
            assert (buffer[:GUARD] == 255).all() and (buffer[-GUARD:] == 255).all(), (
                f"wrote outside buffer {index}"
            )

    def _launch(
        self, launch: Launch, sizes: Mapping[str, int], inputs: Any, weights: Any, buffers: Any
    ) -> None:
        places = {
            "buffer": lambda a: buffers[a.index].ctypes.data + GUARD,
            "weight": lambda a: weights[a.index].ctypes.data,
            "input": lambda a: inputs[a.name].ctypes.data,
            "size": lambda a: 0,
        }
        args = [places[a.kind](a) + evaluate(a.value, sizes) for a in launch.args]
        grid = [evaluate(g, sizes) for g in launch.grid]
        if all(grid):
            x, y, z = (*grid, 1, 1)[:3]
            self.device.launch(self.handles[launch.kernel], (x, y, z), args)


class TritonModel:
    """A graph generated for the interpreter, its weights and poisoned caches."""

    def __init__(
        self,
        text: str | Graph,
        weights: Mapping[str, Array] | None,
        directory: Path,
        *,
        seed: int = 0,
        invariant: bool = False,
        device: str = "triton-interpret",
    ) -> None:
        self.graph = lower(text, "gpu")
        rng = np.random.default_rng(seed)
        self.weights = dict(weights) if weights is not None else random_weights(self.graph, rng)
        self.generated = triton.generate(self.graph, triton.find_device(device), invariant=invariant)
        evaluator = Evaluator(self.graph, Arrays(self.weights))
        self.packed = [np.zeros(w.packed_shape, w.dtype.numpy) for w in self.generated.weights]
        for weight, array in zip(self.generated.weights, self.packed, strict=True):
            triton.fill_weight(weight, evaluator, array)
        self.kernels = Kernels(self.generated, directory)
        self.states = [v.type for v in self.graph.inputs if isinstance(v.type, KV)]
        self.width = int(self.graph.outputs[0].type.shape[-1])  # type: ignore[union-attr]

    def cache(self, blocks: int) -> list[Array]:
        """Poisoned: every element is NaN (all bits set)."""
        return [aligned(blocks * block_bytes(kv), np.uint8, 255) for kv in self.states]

    def step(
        self,
        cache: list[Array],
        chunks: Sequence[Chunk],
        rows: Sequence[int] | None = None,
        stride: int = 64,
        tails: Sequence[Chunk] | None = None,
    ) -> Array:
        """One forward. Returns the logits of `rows` (all tokens by default). tails: with tails' tables."""
        groups = [pack_step((tails or chunks) if kv.tail else chunks, stride, kv.block) for kv in self.states]
        packed = groups[0] if groups else pack_step(chunks, stride)
        rows_array = np.asarray(range(len(packed["ids"])) if rows is None else rows, np.int32)
        logits = aligned(len(rows_array) * self.width, np.float32, np.nan)
        inputs = {n: packed[n] for n in ("ids", "pos", "starts", "lens")} | {
            "rows": rows_array,
            "logits": logits,
        }
        for g, (pool, group) in enumerate(zip(cache, groups, strict=True)):
            inputs |= {f"kv{g}": pool, f"slots{g}": group["slots"], f"table{g}": group["table"]}
        sizes = {"T": len(packed["ids"]), "R": len(chunks), "Q": len(rows_array)}
        sizes |= {f"M{g}": stride for g in range(len(cache))}
        self.kernels.run("forward", sizes, inputs, self.packed)
        return logits.reshape(len(rows_array), self.width)

    def decode_cache(self, cache: Array, group: int, blocks: int) -> dict[str, Array]:
        """The cache as the reference keeps it: a stream's parts, [layers, blocks, *Stream.part_shape]."""
        kv = self.states[group]
        found: dict[str, Array] = {}
        for s, pieces in zip(kv.streams, split_block(kv, cache.reshape(blocks, -1)), strict=True):
            for part, piece in zip(s.parts, pieces, strict=True):
                found[part] = np.ascontiguousarray(np.stack(piece))
        return found


def split_block(kv: KV, raw: Array) -> list[list[list[Array]]]:
    """For each stream, each of its parts, each layer: the part of every block, unpacked.

    raw: blocks [blocks, bytes]. By the description in codegen/triton/kv_layout.py, not by its code.
    """
    found: list[list[list[Array]]] = [[[] for _ in s.parts] for s in kv.streams]
    at = 0
    for _ in range(kv.layers):
        for s, parts in zip(kv.streams, found, strict=True):
            for part, of in zip(s.parts, parts, strict=True):
                unpack = _codes if part == s.name else _scales
                piece, at = unpack(raw, at, s, kv.block)
                of.append(piece)
            at = -(-at // 64) * 64 if kv.state else at
    return found


def _codes(raw: Array, at: int, s: Stream, block: int) -> tuple[Array, int]:
    """(elements or codes [blocks, block, heads, size], without the block's axis where they are its own; where
    they end).
    """
    if s.per_block:
        end = at + s.heads * s.head_size * s.dtype.size_bytes
        part = np.ascontiguousarray(raw[:, at:end])
        return part.view(s.dtype.numpy).reshape(len(raw), s.heads, s.head_size), end
    per = max(1, 8 // s.dtype.bits)
    size = s.head_size if per == 1 else -(-s.head_size // 16) * 16
    end = at + s.heads * block * size * s.dtype.bits // 8
    part = np.ascontiguousarray(raw[:, at:end])
    if per == 1:
        part = part.view(s.dtype.numpy).reshape(len(raw), s.heads, block, size)
        return part.transpose(0, 2, 1, 3), end
    codes = np.stack([part >> (s.dtype.bits * i) & (1 << s.dtype.bits) - 1 for i in range(per)], -1)
    if s.per == "channel":
        codes = codes.reshape(len(raw), s.heads, block // per, size, per).transpose(0, 2, 4, 1, 3)
        return codes.reshape(len(raw), block, s.heads, size)[..., : s.head_size], end
    return codes.reshape(len(raw), s.heads, block, size).transpose(0, 2, 1, 3)[..., : s.head_size], end


def _scales(raw: Array, at: int, s: Stream, block: int) -> tuple[Array, int]:
    width = s.head_size if s.per == "channel" else block
    end = at + 2 * s.heads * width
    part = np.ascontiguousarray(raw[:, at:end]).view(np.float16).reshape(len(raw), s.heads, width)
    return part if s.per == "channel" else part.transpose(0, 2, 1), end
