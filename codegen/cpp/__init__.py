"""The C++ target: `generate` source from a lowered graph, `pack` its weights, `build` shared libraries.

`generate` needs a graph in the paged form whose memory is planned; nothing here needs the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from codegen.cache import Cache
from codegen.cpp.build import (
    LEVELS,
    BuildError,
    Kernel,
    build_levels,
    compiler_version,
    default_levels,
    find_level,
)
from codegen.cpp.context import CodegenError, Context, dtype_of, shape_of
from codegen.cpp.forward import print_forward
from codegen.cpp.pack import pack_weights
from codegen.cpp.qlinears import in_integers
from codegen.cpp.weights import PackedWeight
from codegen.evaluate import Reader
from codegen.packing import listed
from ir.graph import Graph
from ir.types import DType
from passes.memory.sizes import linear_form

INCLUDE = Path(__file__).parent / "include"
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Generated:
    """sources: file name -> text. weights: what `weights[i]` of the C ABI points at. plan: plan.json."""

    graph: Graph
    sources: dict[str, str]
    weights: tuple[PackedWeight, ...]
    plan: dict[str, Any]

    @property
    def weight_order(self) -> list[str]:
        """Names in the packed file, in the order of the C ABI."""
        return [w.name for w in self.weights]

    @property
    def default_levels(self) -> tuple[str, ...]:
        """The ISA levels that are worth a library each."""
        linears = [op for op in self.graph.ops if op.kind in ("linear", "moe_linear")]
        return default_levels(
            bf16=any(dtype_of(op.args[0]) is DType.BF16 for op in linears),
            int8=any(op.kind in ("qlinear", "qmoe_linear") and in_integers(op) for op in self.graph.ops),
        )


def _silent(done: int, total: int) -> None:
    pass


def generate(graph: Graph) -> Generated:
    """Source, weights and memory plan. Raises CodegenError naming an op without a kernel, and its loc."""
    ctx = Context.of(graph)
    text = print_forward(ctx)
    shared = sorted(path for path in INCLUDE.iterdir() if path.suffix in (".cpp", ".h"))
    sources = {"forward.cpp": text} | {path.name: path.read_text() for path in shared}
    order = tuple(ctx.weights.order)
    return Generated(graph, sources, order, arena_plan(graph) | {"weights": listed(order)})


def arena_plan(graph: Graph) -> dict[str, Any]:
    """Bytes of the arena as a linear form, as docs/artifact.md describes plan.json."""
    total = {"T": 0, "R": 0, "Q": 0, "": 0}
    for dim in graph.arena:
        for name, count in linear_form(dim).items():
            total[name] += count
    return {"arena": total, "max_logits_width": int(cast(Any, shape_of(graph.outputs[0])[-1]))}


def pack(generated: Generated, reader: Reader, path: Path, progress: Report = _silent) -> None:
    """Write the packed weights. progress(done, total) counts bytes."""
    pack_weights(generated.graph, generated.weights, reader, path, progress)


def build(
    directory: Path, levels: Sequence[str], progress: Report = _silent, cache: Cache | None = None
) -> list[Kernel]:
    """Build a directory's sources for each ISA level. Raises BuildError with the compiler's message.

    progress(done, total) counts objects. cache: where they are kept; default default_cache().
    """
    return build_levels(directory, levels, progress, cache)


__all__ = [
    "LEVELS", "BuildError", "CodegenError", "Generated", "Kernel", "PackedWeight", "Reader", "build",
    "compiler_version", "default_levels", "find_level", "generate", "pack",
]  # fmt: skip
