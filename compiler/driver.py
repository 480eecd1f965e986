"""The driver: import, passes, generate, pack, build, verify, in one straight function of named steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codegen import cpp
from compiler import importers, manifest, trial
from compiler.artifact import ArtifactWriter
from compiler.check import Checker, random_batch
from compiler.errors import CompileError
from compiler.importers import Imported
from compiler.importers.model import MAX_CONTEXT
from compiler.pipeline import Stage, pipeline, run_pipeline
from compiler.progress import Progress
from compiler.weights import WeightError, read_as
from ir.dims import evaluate, product
from ir.graph import Graph, tensor_of
from ir.text import print_graph
from ir.types import DType
from passes.base import PassError
from runtime.errors import ArtifactError
from runtime.tokenizer import Tokenizer

TARGETS = ("cpu",)
DTYPES = ("f32", "bf16")
WEIGHTS = "weights/cpu.safetensors"
GRAPH = "targets/cpu/graph.ir"
PLAN = "targets/cpu/plan.json"
KERNELS = "targets/cpu/kernels"


def compile_artifact(
    source: Any,
    out: Path,
    *,
    target: str,
    dtype: str,
    max_context: int | None,
    isa: Sequence[str] | None,
    check: bool,
    dump_ir: Path | None,
    force: bool,
    progress: Progress | None,
) -> Path:
    """See compiler.compile."""
    _check_options(target, dtype, max_context)
    try:
        for level in isa or ():
            cpp.find_level(level)
        with ArtifactWriter(out, force) as writer:
            return Compile(writer, dtype, isa, check, dump_ir, progress or Progress()).run(
                source, max_context
            )
    except (PassError, WeightError, cpp.BuildError, cpp.CodegenError) as error:
        raise CompileError(str(error)) from error


def _check_options(target: str, dtype: str, max_context: int | None) -> None:
    if target not in TARGETS:
        raise CompileError(f"--target {target}: not a target. There is {', '.join(TARGETS)}")
    if dtype not in DTYPES:
        raise CompileError(f"--dtype {dtype}: not an element type of weights. There are {', '.join(DTYPES)}")
    if max_context is not None and not 1 <= max_context <= MAX_CONTEXT:
        raise CompileError(f"--max-context {max_context}: must be from 1 to {MAX_CONTEXT}")


class Compile:
    """One compile: what its steps share, and the steps, in the order in which `run` takes them."""

    def __init__(
        self,
        writer: ArtifactWriter,
        dtype: str,
        isa: Sequence[str] | None,
        check: bool,
        dump_ir: Path | None,
        progress: Progress,
    ) -> None:
        self.writer, self.dtype, self.isa, self.progress = writer, dtype, isa, progress
        self.check, self.dump_ir = check, dump_ir

    def run(self, source: Any, max_context: int | None) -> Path:
        self.progress.stage("import")
        imported = importers.load(source, max_context=max_context)
        self._announce(imported)
        self._write_tokenizer(imported)
        checker = self._checker(imported) if self.check else None
        lowered = self._lower(imported, checker)
        generated = self._generate(lowered)
        order = self._pack(generated, imported)
        kernels = self._build(generated)
        self.progress.stage("hash")
        self.writer.seal(self._manifest(imported, lowered, order, kernels))
        self._verify(imported, checker)
        return self.writer.publish()

    def _announce(self, imported: Imported) -> None:
        """Say what is about to be built, and refuse early where the disk has no room for it."""
        num_weights = sum(evaluate(product(tensor_of(w).shape), {}) for w in imported.graph.weights)
        num_bytes = num_weights * DType(self.dtype).size_bytes
        self.progress.note(
            f"{imported.info.name}: {num_weights / 1e6:,.1f} M weights, {num_bytes / 1e6:,.0f} MB at "
            f"{self.dtype}, context {imported.info.max_context:,} -> {self.writer.out}"
        )
        free = shutil.disk_usage(self.writer.root).free
        if free < num_bytes:
            raise CompileError(
                f"{self.writer.out}: needs about {num_bytes / 1e6:,.0f} MB and the disk has "
                f"{free / 1e6:,.0f} MB free. Free some, or choose another place with -o"
            )

    def _checker(self, imported: Imported) -> Checker:
        batch = random_batch(imported.info.vocab_size, imported.info.max_context)
        return Checker(weight_reader(imported), batch)

    def _lower(self, imported: Imported, checker: Checker | None) -> Graph:
        passes = pipeline(self.dtype, read=weight_reader(imported))

        def on_stage(stage: Stage) -> None:
            self.progress.graph(stage.name, stage.graph, stage.count, stage.misses)
            self._dump(stage)
            if checker is not None:
                self.progress.stage(f"check {stage.name}")
                checker.on_stage(stage)
            if stage.index < len(passes):
                self.progress.stage(passes[stage.index].name)

        lowered = run_pipeline(imported.graph, passes, on_stage)
        self.progress.lowered(lowered)
        self.writer.write(GRAPH, print_graph(lowered))
        return lowered

    def _dump(self, stage: Stage) -> None:
        if self.dump_ir is None:
            return
        name, text = f"{stage.index:02}-{stage.name}.ir", print_graph(stage.graph)
        self.dump_ir.mkdir(parents=True, exist_ok=True)
        (self.dump_ir / name).write_text(text)
        self.writer.write(f"stages/{name}", text)

    def _generate(self, lowered: Graph) -> cpp.Generated:
        self.progress.stage("generate")
        generated = cpp.generate(lowered)
        self.progress.sources(generated.sources)
        for name, text in generated.sources.items():
            self.writer.write(f"{KERNELS}/{name}", text)
        self.writer.write(PLAN, json.dumps(generated.plan) + "\n")
        return generated

    def _pack(self, generated: cpp.Generated, imported: Imported) -> list[str]:
        self.progress.stage("pack")
        cpp.pack(generated, imported.weights, self.writer.path(WEIGHTS), self.progress.advance)
        return list(generated.weight_order)

    def _build(self, generated: cpp.Generated) -> list[cpp.Kernel]:
        self.progress.stage("build")
        levels = generated.default_levels if self.isa is None else self.isa
        return cpp.build(self.writer.root / KERNELS, levels, self.progress.advance)

    def _write_tokenizer(self, imported: Imported) -> None:
        """Copy the checkpoint's tokenizer, if the runtime can read it."""
        try:
            Tokenizer.read(imported.tokenizer_files, imported.info.bos_token_id)
        except ArtifactError as error:
            raise CompileError(
                f"the checkpoint's {error.where}: {error.what}. Get an undamaged copy, or remove it: prompts "
                "are token ids then"
            ) from error
        for name, content in imported.tokenizer_files.items():
            self.writer.write(f"tokenizer/{name}", content)

    def _manifest(
        self, imported: Imported, lowered: Graph, order: list[str], kernels: list[cpp.Kernel]
    ) -> dict[str, Any]:
        built = [manifest.kernel_entry(kernel, KERNELS) for kernel in kernels]
        cpu = {"graph": GRAPH, "plan": PLAN, "weights": WEIGHTS, "weight_order": order, "kernels": built}
        return {
            "name": imported.info.name,
            "made_by": {"octavo": manifest.octavo_version(), "compiler": cpp.compiler_version()},
            "source": manifest.source_entry(imported.info),
            "model": manifest.model_entry(imported.info, self.dtype),
            "tokenizer": manifest.tokenizer_entry(imported.tokenizer_files),
            "kv_groups": manifest.kv_groups(lowered),
            "targets": {"cpu": cpu},
        }

    def _verify(self, imported: Imported, checker: Checker | None) -> None:
        """Run the compiled forward as the runtime will; with --check compare it with the interpreter."""
        self.progress.stage("verify")
        artifact = trial.open_sealed(self.writer.root)
        if not trial.runnable(artifact):
            self.progress.note("not run: no kernel was built for this machine's CPU")
            return
        batch = random_batch(imported.info.vocab_size, imported.info.max_context)
        logits = trial.compiled_logits(artifact, batch)
        if checker is not None:
            checker.compare_logits("the compiled forward", logits)
        elif not np.isfinite(logits).all():
            raise CompileError(
                f"{imported.info.name}: the compiled forward gives logits that are not finite. Compile with "
                "--check, which names the first pass that changes a result, or check the checkpoint's weights"
            )


def weight_reader(imported: Imported) -> Callable[[str], Any]:
    """Finds a weight's array by name, in the element type that the graph gives it."""
    weights = {weight.name: weight for weight in imported.graph.weights}
    return lambda name: read_as(imported.weights, weights[name])
