"""From what was asked for to passes that quantise: which format each matrix gets, what is fitted, what is
measured.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from compiler.errors import CompileError
from compiler.importers.model import Imported
from compiler.quantization import text
from compiler.quantization.calibrate import Calibration, Fitted
from compiler.quantization.gate import Measured, measure
from compiler.quantization.grid import Array, Grid
from compiler.quantization.options import AUTO, NONE, OWN, SHARED_KEYS, Quantization, matches
from compiler.quantization.store import Store
from compiler.weights import read_as
from ir.dims import evaluate
from ir.graph import Graph, Weight, tensor_of
from ir.types import DType
from passes.linears import experts_of
from passes.paging.formats import FORMATS, KeyGrid
from passes.quantize_activations import QuantizeActivations
from passes.quantize_kv import QuantizeKv
from passes.quantize_weights import MatrixUse, QuantizeWeights, find_matrices
from runtime.tokenizer import Tokenizer

ROWS = 4096  # of a weight, that are looked at together
WINDOW = 512  # tokens of a window of calibration text
CALIBRATION_TOKENS, HELD_OUT_TOKENS = 12288, 2048
FEW_TOKENS = 4096  # too few of them to calibrate well with
RANDOM_TOKENS = 2048  # where there is no tokenizer to read a text with
FITTED = ("int4", "int8")  # formats whose codes are fitted to text
FLOATS = (DType.F16, DType.BF16, DType.F32)
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Decided:
    """The passes' options. formats: of each matrix, by its name. measured: by the gate; None: it did not
    run. nearest: stacks of experts that are rounded to the nearest where other matrices are fitted.
    """

    weights: QuantizeWeights = field(default_factory=QuantizeWeights)
    activations: QuantizeActivations = field(default_factory=QuantizeActivations)
    kv: str = ""
    keys: Mapping[str, KeyGrid] = field(default_factory=dict[str, KeyGrid])
    formats: Mapping[str, str] = field(default_factory=dict[str, str])
    measured: Measured | None = None
    raised: tuple[str, ...] = ()
    nearest: tuple[str, ...] = ()

    def run(self, graph: Graph) -> Graph:
        """The quantised graph, as the pipeline's passes make it."""
        graph = self.activations.run(self.weights.run(graph).graph).graph
        return QuantizeKv(format=self.kv if self.kv in FORMATS else NONE, keys=self.keys).run(graph).graph


@dataclass
class Decision:
    """One model's. graph: paged, with rows selected. asked: with defaults in their places. keys: how keys are
    shifted and scaled, where that was found before.
    """

    asked: Quantization
    graph: Graph
    imported: Imported
    store: Store
    report: Report = lambda done, total: None
    note: Callable[[str], None] = lambda text: None
    keys: Mapping[str, KeyGrid] | None = None

    def __post_init__(self) -> None:
        self.matrices = {arg.name: (arg, uses) for arg, uses in find_matrices(self.graph).items()}
        self._weights = {w.name: w for w in self.graph.weights}
        _check_keep(self.asked, [paths(uses) for _, uses in self.matrices.values()])

    def first(self, *, weights: bool = True) -> Decided:
        """By the rules that were given, fitted to text where that was asked for, and where there are
        weights.
        """
        formats = {name: self._format_of(uses) for name, (_, uses) in self.matrices.items()}
        if weights:
            self._check_values(formats)
        fitted = self._fit(formats) if weights else Fitted()
        return self._decided(formats, fitted)

    def _format_of(self, uses: list[MatrixUse]) -> str:
        """What chooses among experts stays as it is, unless a rule names it."""
        routes = any(use.routes for use in uses)
        return self.asked.format_of(paths(uses), NONE if routes else None)

    def measured(self, decided: Decided, windows: text.Windows) -> Decided:
        found = measure(self.graph, decided.run(self.graph), self._read, windows, self.report)
        return replace(decided, measured=found)

    def held_out(self) -> text.Windows:
        source = text.default_text(text.HELD_OUT)
        return self._windows(source, "held-out text", HELD_OUT_TOKENS, 1024)

    def raised(self, decided: Decided, formats: Mapping[str, str]) -> Decided:
        """With other formats; codes that were fitted for a format that stays are kept."""
        stays = {name for name, format in formats.items() if format == decided.formats[name]}
        kept = {name: codes for name, codes in decided.weights.calibrated.items() if name in stays}
        changed = {
            uses[0].place or paths(uses)[0]: formats[n]
            for n, (_, uses) in self.matrices.items()
            if n not in stays
        }
        before = {each.rpartition("=")[0]: each.rpartition("=")[2] for each in decided.raised}
        raised = tuple(f"{path}={format}" for path, format in {**before, **changed}.items())
        return replace(self._decided(formats, Fitted(kept, dict(decided.keys))), raised=raised)

    def _check_values(self, formats: Mapping[str, str]) -> None:
        """Of every weight that a quantised matrix is made of, and of the scales of a grid of its own. Raises
        CompileError.
        """
        chosen = {name: format for name, format in formats.items() if format != NONE}
        by_module = {path: format for name, format in chosen.items() for path in _own(self.matrices[name][1])}
        for name in self._weights:
            module = name if name in by_module else name.rpartition(".")[0] or name
            format = by_module.get(module, chosen.get(name))
            if format is not None:
                self._check_weight(name, module, self.asked.grid(format))
        for name in _of_own_grids(self.graph):
            self._check_weight(name, "", None)

    def _check_weight(self, name: str, module: str, grid: Grid | None) -> None:
        """grid: what it will be on; None: it is a part of a grid of its own."""
        array = np.atleast_1d(self.imported.weights.read(name))
        array = array.reshape(-1, array.shape[-1]) if array.ndim > 2 else array  # a stack of matrices
        count, largest = 0, 0.0
        for lo in range(0, len(array), ROWS):
            part = np.asarray(array[lo : lo + ROWS], np.float32)
            count += int(part.size - np.isfinite(part).sum())
            largest = max(largest, float(np.abs(part).max(initial=0)))
        keep = f", or keep it as it is: --keep {module}" if grid else ""
        if count:
            what = f"{count:,} of {array.size:,} {'weights' if grid else 'numbers'} are NaN or infinite"
            raise CompileError(what, where=f"tensor {name!r}", todo=f"Get an undamaged copy{keep}")
        if grid is not None and array.ndim > 1 and largest > grid.largest:
            what = f"weights up to {largest:.1e} need scales beyond {grid.scale}"
            raise CompileError(what, where=f"tensor {name!r}", todo=f"Get an undamaged copy{keep}")

    def _fit(self, formats: Mapping[str, str]) -> Fitted:
        grids = self._grids(formats) if self.asked.calibrates else {}
        keys = self.asked.kv in SHARED_KEYS and self.keys is None
        known = dict(self.keys or {})
        if not grids and not keys:
            return Fitted(keys=known)
        if stacks := self._stacks(grids):
            what = f"{len(stacks)} stacks of experts are rounded to the nearest, not fitted"
            self.note(f"  {self.asked.algorithm}: {what}")
        run = Calibration(
            self.graph, self._read, grids, self.asked.algorithm or "", self._activations(), self.store, keys,
            self.report,
        )  # fmt: skip
        found = run.run(self._calibration_text())
        return found if keys else replace(found, keys=known)

    def _stacks(self, names: Iterable[str]) -> list[str]:
        """Of matrices those that are stacks of experts', as options and reports call them."""
        uses = {name: self.matrices[name][1] for name in names}
        stacks = [each for each in uses.values() if any(experts_of(u.op) is not None for u in each)]
        return [each[0].place or paths(each)[0] for each in stacks]

    def _grids(self, formats: Mapping[str, str]) -> dict[str, Grid]:
        """Of the matrices that are fitted: not of tables, which are rounded row by row."""
        tables = {
            name for name, (_, uses) in self.matrices.items() if any(u.op.kind == "embed" for u in uses)
        }
        fitted = {name: f for name, f in formats.items() if f in FITTED and name not in tables}
        return {name: self.asked.grid(format) for name, format in fitted.items()}

    def _calibration_text(self) -> text.Windows:
        path = self.asked.calibration
        source = text.read_text(path) if path else text.default_text(text.CALIBRATION)
        found = self._windows(source, str(path or "calibration text"), CALIBRATION_TOKENS, WINDOW)
        if found.source == text.RANDOM:
            self.note("  no tokenizer to read a text with: quantisation is fitted to random tokens")
        elif found.num_tokens < FEW_TOKENS:
            self.note(f"  only {found.num_tokens:,} tokens to calibrate with: more text gives a better model")
        return found

    def _windows(self, given: str, source: str, tokens: int, size: int) -> text.Windows:
        info = self.imported.info
        size = min(size, info.max_context, *text.most_tokens(self.graph))
        tokenizer = Tokenizer.read(self.imported.tokenizer_files, info.bos_token_id)
        tokens = tokens if tokenizer is not None else min(tokens, RANDOM_TOKENS)
        return text.windows(tokenizer, given, source, size, -(-tokens // size), info.vocab_size)

    def _decided(self, formats: Mapping[str, str], fitted: Fitted) -> Decided:
        """Each matrix by the paths of its weights, so that no pattern takes it for another."""
        by_path = {path: formats[name] for name, (_, uses) in self.matrices.items() for path in _own(uses)}
        codes = {path: str(self.asked.grid(f).dtype) for path, f in by_path.items() if f != NONE}
        weights = QuantizeWeights(
            dtype=self._dtype(),
            group_size=self._group_size(),
            symmetric=self.asked.symmetric,
            keep=tuple(glob.escape(path) for path, f in by_path.items() if f == NONE),
            overrides=tuple(f"{glob.escape(path)}={dtype}" for path, dtype in codes.items()),
            calibrated=fitted.codes,
        )
        kv = self.asked.kv or ""
        nearest = tuple(self._stacks(self._grids(formats) if self.asked.calibrates else ()))
        return Decided(weights, self._activations(), kv, fitted.keys, dict(formats), nearest=nearest)

    def _dtype(self) -> str:
        """Of most codes, which says how far a check of the pass may be off."""
        format = {AUTO: "int4", OWN: NONE}.get(self.asked.weights, self.asked.weights)
        return NONE if format == NONE else str(self.asked.grid(format).dtype)

    def _group_size(self) -> int:
        asked = self.asked
        return (
            32
            if asked.weights == NONE
            else asked.grid("int4" if asked.weights == AUTO else asked.weights).group
        )

    def _activations(self) -> QuantizeActivations:
        size = 0 if self.asked.activations == "int8-token" else 32
        dtype = {"int8": "i8", "int8-token": "i8", "fp8": "f8e4m3"}.get(self.asked.activations or NONE, NONE)
        return QuantizeActivations(dtype, size)

    def _read(self, name: str) -> Array:
        if name in self.store.names:
            return self.store.read(name)
        return read_as(self.imported.weights, self._weights[name])

    def num_weights(self, name: str) -> int:
        rows, columns = (evaluate(d, {}) for d in tensor_of(self.matrices[name][0]).shape)
        return int(rows * columns)


def paths(uses: list[MatrixUse]) -> list[str]:
    """All that a matrix may be called by."""
    return [path for use in uses for path in use.paths if path]


def _own(uses: list[MatrixUse]) -> list[str]:
    """Of the weights that it is made of, where there are any: ops of several matrices may share a module."""
    found = [path for use in uses for path in use.paths[1:] if path] or paths(uses)
    return list(dict.fromkeys(found))


def _of_own_grids(graph: Graph) -> list[str]:
    """Weights that are scales, offsets or float codes, as a checkpoint has them."""
    found = [arg for op in graph.ops if op.kind == "dequantize" for arg in op.args]
    weights = {arg.name: tensor_of(arg).dtype for arg in found if isinstance(arg, Weight)}
    return [name for name, dtype in weights.items() if dtype in (*FLOATS, DType.F8E4M3)]


def _check_keep(asked: Quantization, matrices: list[list[str]]) -> None:
    for rule in asked.keep:
        pattern = rule.partition("=")[0]
        if not any(matches(pattern, path) for found in matrices for path in found):
            some = ", ".join(dict.fromkeys(found[-1] for found in matrices[:4] if found))
            todo = f"Give paths of modules with a matrix, or patterns of them, such as {some}"
            raise CompileError("it names no module with a matrix", where=f"--keep {rule}", todo=todo)
