"""One forward of a compile: from the imported graph to what its targets run, in named steps.

An artifact has one, and another where it bundles a draft: the same steps, with other formats of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from codegen.cache import Cache
from compiler.artifact import ArtifactWriter
from compiler.check import Checker
from compiler.importers import Imported
from compiler.options import Options
from compiler.pipeline import Stage, pipeline, run_pipeline
from compiler.progress import Progress, Stopwatch
from compiler.quantization.decide import Decided
from compiler.quantization.options import Quantization
from compiler.quantization.step import STAGES, Quantizer
from compiler.targets import Target, by_device
from ir.graph import Graph
from ir.text import print_graph
from passes.base import Pass
from passes.plan_memory import PlanMemory
from passes.quantize_weights import QuantizeWeights

STEPS = ("generate", "pack", "build")  # after the passes


@dataclass(frozen=True)
class Job:
    """What the steps of a compile share: what was asked for, where they write, whom they tell."""

    writer: ArtifactWriter
    options: Options
    dtype: str
    block: int
    progress: Progress
    watch: Stopwatch
    cache: Cache


class Forward:
    """asked: how it is quantised. label: before the names of its stages; "" for the model itself.

    lowered: by kind of device, once `lower` has run: the graphs differ in the memory plan alone. built: of
    each target the kernels that were found in the cache, and that were built.
    """

    def __init__(self, job: Job, asked: Quantization, targets: Sequence[Target], label: str = "") -> None:
        self.asked, self.targets, self.label = asked, targets, label
        self.kinds = by_device(targets)
        self.lowered: dict[str, Graph] = {}
        self.built: dict[str, tuple[int, int]] = {}
        self._job = job

    def pass_stages(self) -> list[str]:
        """Names of the stages of `lower`."""
        names = [each.name for each in self._pipeline(None)]
        if self._job.options.check:
            names = ["check imported", *(name for each in names for name in (each, f"check {each}"))]
        if self.asked.any:
            at = names.index("quantize_weights")
            names[at:at] = STAGES
        return [self._called(name) for name in names]

    def stages(self, step: str) -> list[str]:
        """Names of the stages of one of STEPS."""
        if step != "pack":
            return [f"{step} {target.name}" for target in self.targets]
        return [f"pack {self.label or kind}" for kind in self.kinds] if self._job.options.weights else []

    def lower(self, imported: Imported, quantizer: Quantizer, checker: Checker | None) -> None:
        """Run the passes."""
        job, passes = self._job, list(self._pipeline(quantizer.read))

        def begin(name: str) -> None:
            job.watch.stage(self._called(name))

        def on_stage(stage: Stage) -> None:
            job.progress.graph(self._called(stage.name), stage.graph, stage.count, stage.misses)
            self._dump(stage)
            if checker is not None:
                begin(f"check {stage.name}")
                checker.on_stage(stage)
            ran = passes[stage.index - 1] if stage.index else None
            if isinstance(ran, PlanMemory):
                self.lowered[ran.device] = stage.graph
            if stage.index < len(passes) and isinstance(passes[stage.index], QuantizeWeights):
                decided = quantizer.decide(stage.graph, begin, weights=job.options.weights)
                passes[stage.index :] = self._pipeline(quantizer.read, decided)[stage.index :]
            if stage.index < len(passes):
                begin(passes[stage.index].name)

        run_pipeline(imported.graph, passes, on_stage)

    def generate(self) -> None:
        for graph in self.lowered.values():
            self._job.progress.lowered(graph)
        for target in self._each("generate"):
            graph = self.lowered[target.device]
            target.write_graph(graph, self._job.writer)
            self._job.progress.sources(target.generate(graph, self._job.writer))

    def pack(self, imported: Imported) -> None:
        job = self._job
        for name, targets in zip(self.stages("pack"), self.kinds.values(), strict=False):
            job.watch.stage(name)
            path = job.writer.path(targets[0].weights)
            targets[0].pack(targets, imported.weights, path, job.progress.advance)

    def build(self) -> None:
        job, cache = self._job, self._job.cache
        for target in self._each("build"):
            before = cache.hits, cache.misses
            target.build(job.writer, job.progress.advance, cache)
            hits, misses = cache.hits - before[0], cache.misses - before[1]
            self.built[target.name] = hits, misses
            if hits:
                job.progress.note(f"  build {target.name}: {hits} of {hits + misses} kernels from the cache")

    def entries(self) -> dict[str, dict[str, Any]]:
        """What the manifest says of each target, by its name."""
        return {t.name: t.entry(weights=self._job.options.weights) for t in self.targets}

    def _each(self, step: str) -> Iterable[Target]:
        for name, target in zip(self.stages(step), self.targets, strict=True):
            self._job.watch.stage(name)
            yield target

    def _called(self, name: str) -> str:
        return f"{self.label} {name}" if self.label else name

    def _pipeline(
        self, read: Callable[[str], Any] | None, decided: Decided | None = None
    ) -> tuple[Pass, ...]:
        found = decided or Decided(kv=self.asked.kv or "")
        quantized = (found.weights, found.activations, found.kv, found.keys)
        return pipeline(self._job.dtype, self._job.block, read, tuple(self.kinds), *quantized)

    def _dump(self, stage: Stage) -> None:
        folder = self._job.options.dump_ir
        if folder is None:
            return
        label = f"{self.label}-" if self.label else ""
        name, text = f"{label}{stage.index:02}-{stage.name}.ir", print_graph(stage.graph)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        self._job.writer.write(f"stages/{name}", text)
