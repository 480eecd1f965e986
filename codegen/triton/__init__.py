"""The Triton targets: `generate` source and launches from a graph, `pack` weights for all of them.

The graph is the one that the C++ target takes: in the paged form, with its memory planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.evaluate import Evaluator, Reader
from codegen.packing import Report, listed, write_tensors
from codegen.triton.context import CodegenError, Context
from codegen.triton.devices import DEVICES, Device, UnknownTarget, find_device
from codegen.triton.forward import print_forward
from codegen.triton.launch import Kernel
from codegen.triton.weights import PackedWeight, fill_weight
from ir.graph import Graph


@dataclass(frozen=True)
class Generated:
    """source: kernels.py. kernels: the binaries to make of it. plan: plan.json."""

    device: Device
    graph: Graph
    source: str
    kernels: tuple[Kernel, ...]
    weights: tuple[PackedWeight, ...]
    plan: dict[str, Any]

    @property
    def weight_order(self) -> list[str]:
        return [w.name for w in self.weights]


def generate(graph: Graph, device: Device, *, invariant: bool = False) -> Generated:
    """Source, kernels, weights and plan. Raises CodegenError naming an op without a kernel, and its loc."""
    ctx = Context.of(graph, device, invariant)
    plan = print_forward(ctx)
    plan["weights"] = listed(ctx.weights.order)
    source = ctx.module.source(f"Kernels of the model {_plain(graph.name)} for {device.target}; generated.")
    return Generated(graph=graph, device=device, source=source, kernels=tuple(ctx.module.kernels.values()),
                     weights=tuple(ctx.weights.order), plan=plan)  # fmt: skip


def pack(targets: Sequence[Generated], reader: Reader, path: Path, progress: Report) -> None:
    """Write the weights that targets of one graph read, each once. progress(done, total) counts bytes."""
    order = {weight.name: weight for generated in targets for weight in generated.weights}
    evaluator = Evaluator(targets[0].graph, reader)
    write_tensors(path, [*order.values()], lambda weight, out: fill_weight(weight, evaluator, out), progress)


def _plain(name: str) -> str:
    """A name that can stand in a docstring."""
    return "".join(c if c.isascii() and (c.isalnum() or c in " ._-") else "?" for c in name)


__all__ = [
    "DEVICES", "CodegenError", "Device", "Generated", "Kernel", "PackedWeight", "UnknownTarget",
    "fill_weight", "find_device", "generate", "pack",
]  # fmt: skip
