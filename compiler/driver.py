"""The driver: import, passes, generate, pack, build, verify, in one straight function of named steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from codegen import cpp
from codegen.cache import Cache, cache_folder, default_cache
from codegen.scratch import scratch
from compiler import importers, manifest, trial
from compiler.artifact import ArtifactWriter, check_apart
from compiler.check import Checker, random_batch
from compiler.disk import check_room, refused_writes
from compiler.errors import CompileError
from compiler.flight import Preflight, preflight
from compiler.importers import Imported
from compiler.options import Options, block_size, check_options, element_type, weight_bytes
from compiler.pipeline import Stage, pipeline, run_pipeline
from compiler.progress import Progress, Stopwatch
from compiler.quantization.decide import Decided
from compiler.quantization.options import NONE, OWN
from compiler.quantization.step import STAGES, Quantizer
from compiler.quantization.store import Store
from compiler.rates import Rates, keep_rates, measured_rates, read_rates
from compiler.refusal import OF_A_MODEL, refusal
from compiler.survey import survey
from compiler.targets import Target, by_device, find_targets
from compiler.weights import read_as
from ir.dims import evaluate, product
from ir.graph import Graph, tensor_of
from ir.text import print_graph
from ir.types import Tensor
from passes.base import Pass
from passes.plan_memory import PlanMemory
from passes.quantize_weights import QuantizeWeights
from runtime.artifact import Artifact
from runtime.errors import ArtifactError
from runtime.tokenizer import Tokenizer


def compile_artifact(
    source: Any,
    out: Path,
    targets: str | Sequence[str],
    options: Options,
    *,
    isa: Sequence[str] | None,
    invariant: bool,
    force: bool,
    progress: Progress | None,
) -> Path:
    """See compiler.compile."""
    told = progress or Progress()
    with _refusals():
        found, writer, cache = _opened(out, targets, options, isa, invariant, force)
        flight = _preflight(source, found, options, writer.out)
        told.preflight(flight)
        flight.check()
        with refused_writes(flight.out, flight.write_bytes), writer:
            return Compile(writer, found, options, told, cache).run(source)


def plan_compile(
    source: Any,
    out: Path,
    targets: str | Sequence[str],
    options: Options,
    *,
    isa: Sequence[str] | None,
    invariant: bool,
    force: bool,
) -> Preflight:
    """What compile_artifact would read, write and take; nothing is written."""
    with _refusals():
        found, writer, _ = _opened(out, targets, options, isa, invariant, force)
        flight = _preflight(source, found, options, writer.out)
        if flight.survey.kind == "unknown":  # the import says what is wrong with it
            importers.load(source, max_context=options.max_context, weights=options.weights)
        return flight


@contextmanager
def _refusals() -> Iterator[None]:
    """What a model or a tool can cause within, as a CompileError."""
    try:
        yield
    except OF_A_MODEL as error:
        raise refusal(error) from error


def _opened(
    out: Path,
    targets: str | Sequence[str],
    options: Options,
    isa: Sequence[str] | None,
    invariant: bool,
    force: bool,
) -> tuple[list[Target], ArtifactWriter, Cache]:
    """What was asked for, checked."""
    check_options(options)
    try:
        cache = default_cache() if options.cache else Cache(None)
    except ValueError as error:
        todo = "Give bytes, or a text like 2GiB"
        raise CompileError(str(error), where="OCTAVO_CACHE_LIMIT", todo=todo) from error
    return find_targets(targets, isa, invariant), ArtifactWriter(out, force), cache


def _preflight(source: Any, targets: Sequence[Target], options: Options, out: Path) -> Preflight:
    if isinstance(source, str | Path) and Path(source).exists():
        check_apart(Path(source), out)
    dtype = element_type(options, targets)
    return preflight(
        source,
        survey(source, weights=options.weights),
        out,
        targets={target.name: target.levels(dtype) for target in targets},
        num_kinds=len(by_device(targets)),
        dtype=dtype,
        weight_bytes=weight_bytes(options, dtype),
        max_context=options.max_context,
        block=block_size(options),
        rates=Rates() if options.check or options.quantization.any else read_rates(cache_folder()),
        cached=options.cache,
        quantized=_quantized(options),
    )


def _quantized(options: Options) -> str:
    """What is quantised, in the words of the options."""
    asked = options.quantization
    formats = {"weights": asked.weights, "activations": asked.activations, "kv": asked.kv}
    given = [f"{name} {format}" for name, format in formats.items() if format not in (None, NONE)]
    return ", ".join(given) if asked.any else ""


class Compile:
    """One compile: what its steps share, and the steps, in the order in which `run` takes them."""

    def __init__(
        self,
        writer: ArtifactWriter,
        targets: Sequence[Target],
        options: Options,
        progress: Progress,
        cache: Cache | None = None,
    ) -> None:
        self.writer, self.targets, self.options, self.progress = writer, targets, options, progress
        self.kinds = by_device(targets)
        self.built: dict[str, tuple[int, int]] = {}  # of each target: kernels found in the cache, and built
        self.names = [target.name for target in targets]
        self.cache, self.watch = cache or Cache(None), Stopwatch(progress)
        self.cache.note = progress.note
        self.dtype, self.block = element_type(options, targets), block_size(options)
        self.quantization = options.quantization.resolved(tuple(self.kinds))

    def run(self, source: Any) -> Path:
        with scratch() if self.quantization.any else nullcontext(Path()) as folder:
            return self._run(source, Store(folder))

    def _run(self, source: Any, store: Store) -> Path:
        """store: of the arrays that calibration makes."""
        self.progress.stages(self._stages())
        self.watch.stage("import")
        keep = self.quantization.weights == OWN
        wanted = {"max_context": self.options.max_context, "weights": self.options.weights, "keep_grid": keep}
        imported = importers.load(source, **wanted)
        self._refuse_what_does_not_fit(imported)
        self._write_tokenizer(imported)
        quantizer = Quantizer(self.quantization, imported, store, self.progress)
        checker = self._checker(imported, quantizer) if self.options.check else None
        lowered = self._lower(imported, quantizer, checker)
        self._generate(lowered)
        self._pack(quantizer.imported())
        self._build()
        self.watch.stage("hash")
        self.writer.seal(self._manifest(imported, quantizer, lowered), self.progress.advance)
        self._verify(checker)
        self.watch.stop()
        path = self.writer.publish()
        self._keep_rates(imported, path)
        return path

    def _stages(self) -> list[str]:
        """The names of those that are to come."""
        passes = [each.name for each in self._pipeline(None)]
        if self.options.check:
            passes = ["check imported", *(name for each in passes for name in (each, f"check {each}"))]
        if self.quantization.any:
            at = passes.index("quantize_weights")
            passes[at:at] = STAGES
        after = {
            "generate": self.names,
            "pack": self.kinds if self.options.weights else (),
            "build": self.names,
        }
        later = [f"{verb} {name}" for verb, names in after.items() for name in names]
        return ["import", *passes, *later, "hash", *(f"verify {name}" for name in self.names)]

    def _refuse_what_does_not_fit(self, imported: Imported) -> None:
        """Again, by the graph: of what the source's headers do not say, it is known only now."""
        each = weight_bytes(self.options, self.dtype)
        num_bytes = sum(_packed_bytes(tensor_of(w), each) for w in imported.graph.weights)
        need = num_bytes * len(self.kinds) if self.options.weights else 0
        check_room(need, shutil.disk_usage(self.writer.root).free, self.writer.out)

    def _checker(self, imported: Imported, quantizer: Quantizer) -> Checker:
        batch = random_batch(imported.info.vocab_size, imported.info.max_context, self.block)
        return Checker(quantizer.read, batch)

    def _pipeline(
        self, read: Callable[[str], Any] | None, decided: Decided | None = None
    ) -> tuple[Pass, ...]:
        found = decided or Decided(kv=self.quantization.kv or "")
        quantized = (found.weights, found.activations, found.kv, found.keys)
        return pipeline(self.dtype, self.block, read, tuple(self.kinds), *quantized)

    def _lower(self, imported: Imported, quantizer: Quantizer, checker: Checker | None) -> dict[str, Graph]:
        """The lowered graph for each kind of device: they differ in the memory plan alone."""
        passes = list(self._pipeline(quantizer.read))
        lowered: dict[str, Graph] = {}

        def on_stage(stage: Stage) -> None:
            self.progress.graph(stage.name, stage.graph, stage.count, stage.misses)
            self._dump(stage)
            if checker is not None:
                self.watch.stage(f"check {stage.name}")
                checker.on_stage(stage)
            ran = passes[stage.index - 1] if stage.index else None
            if isinstance(ran, PlanMemory):
                lowered[ran.device] = stage.graph
            if stage.index < len(passes) and isinstance(passes[stage.index], QuantizeWeights):
                decided = quantizer.decide(stage.graph, self.watch.stage, weights=self.options.weights)
                passes[stage.index :] = self._pipeline(quantizer.read, decided)[stage.index :]
            if stage.index < len(passes):
                self.watch.stage(passes[stage.index].name)

        run_pipeline(imported.graph, passes, on_stage)
        return lowered

    def _dump(self, stage: Stage) -> None:
        if self.options.dump_ir is None:
            return
        name, text = f"{stage.index:02}-{stage.name}.ir", print_graph(stage.graph)
        self.options.dump_ir.mkdir(parents=True, exist_ok=True)
        (self.options.dump_ir / name).write_text(text)
        self.writer.write(f"stages/{name}", text)

    def _generate(self, lowered: dict[str, Graph]) -> None:
        for graph in lowered.values():
            self.progress.lowered(graph)
        for target in self.targets:
            self.watch.stage(f"generate {target.name}")
            target.write_graph(lowered[target.device], self.writer)
            self.progress.sources(target.generate(lowered[target.device], self.writer))

    def _pack(self, imported: Imported) -> None:
        for device, targets in self.kinds.items() if self.options.weights else ():
            self.watch.stage(f"pack {device}")
            path = self.writer.path(targets[0].weights)
            targets[0].pack(targets, imported.weights, path, self.progress.advance)

    def _build(self) -> None:
        for target in self.targets:
            self.watch.stage(f"build {target.name}")
            before = self.cache.hits, self.cache.misses
            target.build(self.writer, self.progress.advance, self.cache)
            hits, misses = self.cache.hits - before[0], self.cache.misses - before[1]
            self.built[target.name] = hits, misses
            if hits:
                self.progress.note(f"  build {target.name}: {hits} of {hits + misses} kernels from the cache")

    def _keep_rates(self, imported: Imported, path: Path) -> None:
        """For the estimates of later compiles on this machine."""
        if self.options.weights and not self.options.check and not self.quantization.any:
            num_bytes = sum((path / targets[0].weights).stat().st_size for targets in self.kinds.values())
            tensors, kind = len(imported.graph.weights), f"{imported.info.source_kind}, {self.dtype}"
            measured = measured_rates(self.watch.cpu_s, kind, num_bytes, tensors, self.built)
            keep_rates(cache_folder(), measured)

    def _write_tokenizer(self, imported: Imported) -> None:
        """Copy the checkpoint's tokenizer, if the runtime can read it."""
        try:
            Tokenizer.read(imported.tokenizer_files, imported.info.bos_token_id)
        except ArtifactError as error:
            raise CompileError(
                error.what,
                where=f"{imported.info.source_path}, {error.where}",
                todo="Get an undamaged copy, or remove it: prompts are token ids then",
            ) from error
        for name, content in imported.tokenizer_files.items():
            self.writer.write(f"tokenizer/{name}", content)

    def _manifest(
        self, imported: Imported, quantizer: Quantizer, lowered: dict[str, Graph]
    ) -> dict[str, Any]:
        tools = {"compiler": cpp.compiler_version()} if "cpu" in self.kinds else {}
        return {
            "name": imported.info.name,
            "made_by": {"octavo": manifest.octavo_version(), **tools},
            "source": manifest.source_entry(imported.info),
            "model": manifest.model_entry(imported.info, self.dtype, quantizer.entry()),
            "tokenizer": manifest.tokenizer_entry(imported.tokenizer_files),
            "kv_groups": manifest.kv_groups(next(iter(lowered.values()))),
            "targets": {t.name: t.entry(weights=self.options.weights) for t in self.targets},
        }

    def _verify(self, checker: Checker | None) -> None:
        """Run each compiled forward as the runtime will; with --check compare it with the interpreter."""
        artifact = trial.open_sealed(self.writer.root)
        for target in self.targets:
            self.watch.stage(f"verify {target.name}")
            if self.options.weights:
                self._try(target.name, artifact, checker)

    def _try(self, target: str, artifact: Artifact, checker: Checker | None) -> None:
        try:
            logits = trial.compiled_logits(artifact, target)
        except trial.NotRun as reason:
            self.progress.note(f"{target}: not run: {reason}")
            return
        if checker is not None:
            checker.compare_logits(f"the compiled forward for {target}", logits)
        elif not np.isfinite(logits).all():
            raise CompileError(
                f"the compiled forward for {target} gives logits that are not finite",
                where=artifact.manifest.name,
                todo="Check the checkpoint's weights, or compile with --check, which names the first pass "
                "that changes a result",
            )


def weight_reader(imported: Imported) -> Callable[[str], Any]:
    """Finds a weight's array by name, in the element type that the graph gives it."""
    weights = {weight.name: weight for weight in imported.graph.weights}
    return lambda name: read_as(imported.weights, weights[name])


def _packed_bytes(array: Tensor, float_bytes: float) -> int:
    """Of a weight in an artifact; codes keep their type."""
    each = array.dtype.bits / 8 if array.dtype.is_code else float_bytes
    return round(evaluate(product(array.shape), {}) * each)
