"""What a compile does for one target, after the passes: generate, pack, build, describe, try.

A kind of target is a class here; the driver calls its steps in that order and knows no kind itself.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from codegen import cpp, triton
from codegen.cache import Cache
from codegen.evaluate import Reader
from codegen.triton import build as gpu_build
from codegen.triton import toolchain
from compiler import manifest
from compiler.artifact import ArtifactWriter
from compiler.errors import CompileError
from ir.graph import Graph
from ir.text import print_graph

TARGETS = ("cpu", *(device.target for device in triton.DEVICES))
DRAFT = "draft"  # what a compile calls the draft of its CPU target
KNOWN = f"There are {', '.join(TARGETS)}"

Report = Callable[[int, int], None]


class Target(ABC):
    """One target of one compile. device: the kind that memory is planned for, "cpu" or "gpu".

    weights: the file of packed weights, which targets of one kind share.
    """

    name: str
    device: str
    prefers_bf16 = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = f"targets/{name.replace(':', '-')}"

    @property
    def weights(self) -> str:
        return f"weights/{self.device}.safetensors"

    def levels(self, dtype: str) -> Sequence[str]:
        """The ISA levels that it will be built for, known before there is a graph; none: it has no levels."""
        return ()

    def write_graph(self, graph: Graph, writer: ArtifactWriter) -> None:
        writer.write(f"{self.folder}/graph.ir", print_graph(graph))

    @abstractmethod
    def generate(self, graph: Graph, writer: ArtifactWriter) -> Mapping[str, str]:
        """Write the source and the plan, and return the source by file name."""

    @abstractmethod
    def pack(self, sharing: Sequence[Target], reader: Reader, path: Path, report: Report) -> None:
        """Write the packed weights of targets of this kind, this one among them, once for all."""

    @abstractmethod
    def build(self, writer: ArtifactWriter, report: Report, cache: Cache) -> None:
        """Build the binaries, or find them in the cache. Raises the kind's BuildError."""

    @abstractmethod
    def entry(self, *, weights: bool) -> dict[str, Any]:
        """What the manifest says of it."""

    def _entry(self, order: Sequence[str], weights: bool) -> dict[str, Any]:
        """The part that is the same for all kinds."""
        return {
            "graph": f"{self.folder}/graph.ir",
            "plan": f"{self.folder}/plan.json",
            "weights": self.weights if weights else None,
            "weight_order": list(order),
        }


class CpuTarget(Target):
    """C++, and one shared library per ISA level. isa: the levels; None: those that are worth one each."""

    device = "cpu"
    generated: cpp.Generated  # once generate() has run

    def __init__(self, isa: Sequence[str] | None) -> None:
        super().__init__("cpu")
        isa = [isa] if isinstance(isa, str) else isa
        for level in isa or ():
            cpp.find_level(level)
        self.isa = isa

    def levels(self, dtype: str) -> Sequence[str]:
        return cpp.default_levels(bf16=dtype == "bf16") if self.isa is None else self.isa

    def generate(self, graph: Graph, writer: ArtifactWriter) -> Mapping[str, str]:
        self.generated = cpp.generate(graph)
        for name, text in self.generated.sources.items():
            writer.write(f"{self.folder}/kernels/{name}", text)
        writer.write(f"{self.folder}/plan.json", json.dumps(self.generated.plan) + "\n")
        return self.generated.sources

    def pack(self, sharing: Sequence[Target], reader: Reader, path: Path, report: Report) -> None:
        cpp.pack(self.generated, reader, path, report)

    def build(self, writer: ArtifactWriter, report: Report, cache: Cache) -> None:
        levels = self.generated.default_levels if self.isa is None else self.isa
        self._kernels = cpp.build(writer.path(f"{self.folder}/kernels"), levels, report, cache)

    def entry(self, *, weights: bool) -> dict[str, Any]:
        kernels = [manifest.kernel_entry(kernel, f"{self.folder}/kernels") for kernel in self._kernels]
        return {**self._entry(self.generated.weight_order, weights), "kernels": kernels}


class CpuDraft(CpuTarget):
    """The draft of a CPU's target: all of it, the weights too, in a folder of the target's."""

    def __init__(self, drafted: CpuTarget) -> None:
        super().__init__(drafted.isa)
        self.name, self.folder = DRAFT, f"{drafted.folder}/draft"

    @property
    def weights(self) -> str:
        return f"{self.folder}/weights.safetensors"


class GpuTarget(Target):
    """Triton source, and a binary per kernel. invariant: see docs/artifact.md."""

    device = "gpu"
    generated: triton.Generated  # once generate() has run

    def __init__(self, device: triton.Device, invariant: bool) -> None:
        super().__init__(device.target)
        self._device, self._invariant = device, invariant
        self.prefers_bf16 = not device.interpreted
        self._tools = {} if device.interpreted else toolchain.versions(device.backend, device.arch)

    def generate(self, graph: Graph, writer: ArtifactWriter) -> Mapping[str, str]:
        self.generated = triton.generate(graph, self._device, invariant=self._invariant)
        writer.write(f"{self.folder}/{gpu_build.SOURCE}", self.generated.source)
        writer.write(f"{self.folder}/plan.json", json.dumps(self.generated.plan) + "\n")
        return {f"{self.folder}/{gpu_build.SOURCE}": self.generated.source}

    def pack(self, sharing: Sequence[Target], reader: Reader, path: Path, report: Report) -> None:
        generated = [target.generated for target in sharing if isinstance(target, GpuTarget)]
        triton.pack(generated, reader, path, report)

    def build(self, writer: ArtifactWriter, report: Report, cache: Cache) -> None:
        folder = writer.root / self.folder
        built = gpu_build.build_kernels(folder, self.generated.kernels, self._device, report, cache=cache)
        content = json.dumps(gpu_build.kernels_json(built, self._device), indent=1)
        writer.write(f"{self.folder}/kernels.json", content + "\n")

    def entry(self, *, weights: bool) -> dict[str, Any]:
        return {
            "backend": self._device.backend,
            "arch": self._device.arch,
            **self._entry(self.generated.weight_order, weights),
            "kernels": f"{self.folder}/kernels.json",
            "source": f"{self.folder}/{gpu_build.SOURCE}",
            "invariant": self._invariant,
            "built_by": self._tools,
        }


def find_targets(
    names: str | Sequence[str], isa: Sequence[str] | None = None, invariant: bool = False
) -> list[Target]:
    """The targets by name, each once. Raises CompileError, and a BuildError where a tool is missing."""
    wanted = list(dict.fromkeys([names] if isinstance(names, str) else names))
    for name in wanted:
        if name not in TARGETS:
            raise CompileError("not a target", where=f"--target {name}", todo=KNOWN)
    if not wanted:
        raise CompileError("none is given", where="--target", todo=KNOWN)
    if isa is not None and "cpu" not in wanted:
        todo = "Add --target cpu, or leave --isa out"
        raise CompileError("ISA levels are the target cpu's", where="--isa", todo=todo)
    return [
        CpuTarget(isa) if name == "cpu" else GpuTarget(triton.find_device(name), invariant) for name in wanted
    ]


def by_device(targets: Sequence[Target]) -> dict[str, list[Target]]:
    """The targets of each kind of device."""
    found: dict[str, list[Target]] = {}
    for target in targets:
        found.setdefault(target.device, []).append(target)
    return found
