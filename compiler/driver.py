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
from compiler.forward import STEPS, Forward, Job
from compiler.importers import Imported
from compiler.options import (
    Options,
    block_size,
    check_options,
    draft_weight_bytes,
    element_type,
    weight_bytes,
)
from compiler.progress import Progress, Stopwatch
from compiler.quantization.draft import DraftQuantizer, check_draft, check_imported, draft_quantization
from compiler.quantization.options import NONE, OWN
from compiler.quantization.step import Quantizer
from compiler.quantization.store import Store
from compiler.rates import Rates, keep_rates, measured_rates, read_rates
from compiler.refusal import OF_A_MODEL, refusal
from compiler.survey import survey
from compiler.targets import DRAFT, CpuDraft, CpuTarget, Target, by_device, find_targets
from compiler.weights import read_as
from ir.dims import evaluate, product
from ir.graph import tensor_of
from ir.types import Tensor
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
    found = find_targets(targets, isa, invariant)
    if options.draft is not None:
        check_draft(options.draft, options.quantization, tuple(by_device(found)))
    return found, ArtifactWriter(out, force), cache


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
        draft_weight_bytes=draft_weight_bytes(options),
        max_context=options.max_context,
        block=block_size(options),
        rates=Rates() if options.check or _quantized(options) else read_rates(cache_folder()),
        cached=options.cache,
        quantized=_quantized(options),
    )


def _quantized(options: Options) -> str:
    """What is quantised, in the words of the options."""
    asked = options.quantization
    formats = {"weights": asked.weights, "activations": asked.activations, "kv": asked.kv}
    given = [f"{name} {format}" for name, format in formats.items() if format not in (None, NONE)]
    draft = [] if options.draft is None else [f"draft {options.draft}"]
    return ", ".join((given if asked.any else []) + draft)


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
        self.watch = Stopwatch(progress)
        cache = cache or Cache(None)
        cache.note = progress.note
        self.dtype, self.block = element_type(options, targets), block_size(options)
        self.quantization = options.quantization.resolved(tuple(by_device(targets)))
        self._job = Job(writer, options, self.dtype, self.block, progress, self.watch, cache)
        self.model = Forward(self._job, self.quantization, targets)
        self.draft = None if options.draft is None else self._draft(targets)

    def _draft(self, targets: Sequence[Target]) -> Forward:
        """That of the CPU's target, which has one."""
        drafting = [CpuDraft(target) for target in targets if isinstance(target, CpuTarget)]
        return Forward(self._job, draft_quantization(self.options.quantization), drafting, "draft")

    @property
    def forwards(self) -> list[Forward]:
        return [self.model] if self.draft is None else [self.model, self.draft]

    def run(self, source: Any) -> Path:
        with scratch() if self.quantization.any or self.draft else nullcontext(Path()) as folder:
            return self._run(source, folder)

    def _run(self, source: Any, folder: Path) -> Path:
        """folder: for the arrays that calibration makes."""
        self.progress.stages(self._stages())
        self.watch.stage("import")
        imported = self._import(source, keep_grid=self.quantization.weights == OWN)
        for note in imported.notes:
            self.progress.note(f"  {note}")
        self._refuse_what_does_not_fit(imported)
        self._write_tokenizer(imported)
        quantizer = Quantizer(self.quantization, imported, Store(folder / "model"), self.progress)
        checkers = [self._lower(self.model, imported, quantizer)]
        quantizers = [quantizer]
        if self.draft is not None:
            check_imported(imported, self.options.draft or "")
            if self.quantization.weights == OWN:  # it is fitted to what the codes stand for
                imported = self._import(source, keep_grid=False)
            store = Store(folder / "draft")
            drafting = DraftQuantizer(self.draft.asked, imported, store, self.progress, quantizer)
            checkers.append(self._lower(self.draft, imported, drafting))
            quantizers.append(drafting)
        for forward in self.forwards:
            forward.generate()
        for forward, each in zip(self.forwards, quantizers, strict=True):
            forward.pack(each.imported())
        for forward in self.forwards:
            forward.build()
        self.watch.stage("hash")
        self.writer.seal(self._manifest(imported, quantizers), self.progress.advance)
        self._verify(checkers)
        self.watch.stop()
        path = self.writer.publish()
        self._keep_rates(imported, path)
        return path

    def _import(self, source: Any, *, keep_grid: bool) -> Imported:
        options = self.options
        return importers.load(
            source,
            max_context=options.max_context,
            weights=options.weights,
            keep_grid=keep_grid,
            example_inputs=options.example_inputs,
        )

    def _stages(self) -> list[str]:
        """The names of those that are to come."""
        passes = [name for forward in self.forwards for name in forward.pass_stages()]
        later = [name for step in STEPS for forward in self.forwards for name in forward.stages(step)]
        return ["import", *passes, *later, "hash", *(f"verify {name}" for name in self._tried)]

    @property
    def _tried(self) -> list[str]:
        """Targets, as `trial` calls them."""
        return [target.name for forward in self.forwards for target in forward.targets]

    def _refuse_what_does_not_fit(self, imported: Imported) -> None:
        """Again, by the graph: of what the source's headers do not say, it is known only now."""
        each = weight_bytes(self.options, self.dtype)
        sizes = [tensor_of(w) for w in imported.graph.weights]
        num_bytes = sum(_packed_bytes(size, each) for size in sizes) * len(self.model.kinds)
        num_bytes += sum(_packed_bytes(size, draft_weight_bytes(self.options)) for size in sizes)
        need = num_bytes if self.options.weights else 0
        check_room(need, shutil.disk_usage(self.writer.root).free, self.writer.out)

    def _lower(self, forward: Forward, imported: Imported, quantizer: Quantizer) -> Checker | None:
        """Run the passes; what checked them, if it was asked for."""
        batch = random_batch(imported.info.vocab_size, imported.info.max_context, self.block)
        checker = Checker(quantizer.read, batch) if self.options.check else None
        forward.lower(imported, quantizer, checker)
        return checker

    def _keep_rates(self, imported: Imported, path: Path) -> None:
        """For the estimates of later compiles on this machine."""
        plain = not self.options.check and not self.quantization.any and self.draft is None
        if self.options.weights and plain:
            files = (targets[0].weights for targets in self.model.kinds.values())
            num_bytes = sum((path / file).stat().st_size for file in files)
            tensors, kind = len(imported.graph.weights), f"{imported.info.source_kind}, {self.dtype}"
            measured = measured_rates(self.watch.cpu_s, kind, num_bytes, tensors, self.model.built)
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

    def _manifest(self, imported: Imported, quantizers: Sequence[Quantizer]) -> dict[str, Any]:
        tools = {"compiler": cpp.compiler_version()} if "cpu" in self.model.kinds else {}
        targets = self.model.entries()
        if self.draft is not None:
            drafts = {"quantization": quantizers[-1].entry(), **self.draft.entries()[DRAFT]}
            targets["cpu"] = {**targets["cpu"], "draft": drafts}
        return {
            "name": imported.info.name,
            "made_by": {"octavo": manifest.octavo_version(), **tools},
            "source": manifest.source_entry(imported.info),
            "model": manifest.model_entry(imported.info, self.dtype, quantizers[0].entry()),
            "tokenizer": manifest.tokenizer_entry(imported.tokenizer_files),
            "kv_groups": manifest.kv_groups(next(iter(self.model.lowered.values()))),
            "targets": targets,
        }

    def _verify(self, checkers: Sequence[Checker | None]) -> None:
        """Run each compiled forward as the runtime will; with --check compare it with the interpreter."""
        artifact = trial.open_sealed(self.writer.root)
        for forward, checker in zip(self.forwards, checkers, strict=True):
            for target in forward.targets:
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
