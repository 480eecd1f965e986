"""What a compile was asked for in quantisation, its defaults, and what no compile can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from compiler.errors import CompileError
from compiler.quantization.grid import Grid
from compiler.quantization.text import read_text
from ir.types import DType

NONE, AUTO, OWN = "none", "auto", "own"  # own: as a checkpoint that comes quantised has them
WEIGHTS = ("int4", "int8", "fp8", AUTO, OWN, NONE)
GROUPS = {"int4": (32, 64, 128), "int8": (32, 64, 128, 0), "fp8": (0,)}
ALGORITHMS = ("rtn", "gptq", "awq")
ACTIVATIONS = ("int8", "int8-token", "fp8", NONE)
_INTEGERS = {"int4", "int8", AUTO, OWN}
BESIDE = {"int8": _INTEGERS, "int8-token": _INTEGERS, "fp8": {"fp8", OWN}}  # weights, by activations
SHARED_KEYS = ("int8", "fp8")  # KV formats whose channels share a token's scale, and gain by a static one
KV = ("f32", "bf16", "int8", "fp8", "int4", "int2")
TYPICAL = 4096  # inputs of a matrix
# The mean KL in nats past which a compile is refused. They are three times or more what a model of 135
# million parameters has with the default algorithms; larger models have less.
MAX_KL = {"int4": 0.7, "int8": 0.02, "fp8": 0.2, AUTO: 0.1, OWN: 0.05}
MAX_KL_KV = {"f32": 0.0, "bf16": 0.01, "int8": 0.01, "fp8": 0.1, "int4": 0.15, "int2": 4.0}


@dataclass(frozen=True)
class Quantization:
    """weights: int4, int8, fp8, auto, own or none. group: inputs that share a scale, 0 for all of a row's;
    None: the format's own. algorithm: None: gptq for int weights, else rtn. keep: patterns of module paths
    that stay as they are, or PATTERN=FORMAT. activations: None: int8 beside int weights where a CPU is
    compiled for. kv: None: as the compile's dtype. calibration: a text file; None: the text of this
    package. max_kl: the mean KL to the unquantised model past which the compile is refused; None: by
    format.
    """

    weights: str = NONE
    group: int | None = None
    algorithm: str | None = None
    symmetric: bool = True
    keep: tuple[str, ...] = ()
    activations: str | None = None
    kv: str | None = None
    calibration: Path | None = None
    max_kl: float | None = None

    @property
    def any(self) -> bool:
        """Whether something is quantised."""
        return self.weights != NONE or self.kv not in (None, "f32", "bf16") or self.quantizes_activations

    @property
    def changes(self) -> bool:
        """Whether the model computes other numbers than its checkpoint's."""
        return replace(self, weights=NONE).any or self.weights not in (OWN, NONE)

    @property
    def formats(self) -> set[str]:
        """That weights are asked for in, by rules too."""
        return {self.weights, *(rule.rpartition("=")[2] for rule in self.keep if "=" in rule)} - {NONE}

    @property
    def quantizes_activations(self) -> bool:
        return self.activations not in (None, NONE)

    @property
    def calibrates(self) -> bool:
        """Whether weights are fitted to text."""
        return self.weights in ("int4", "int8", AUTO) and self.algorithm in ("gptq", "awq")

    def resolved(self, devices: Sequence[str]) -> Quantization:
        """With every default in its place. devices: the kinds that are compiled for, "cpu" and "gpu"."""
        algorithm = self.algorithm or ("gptq" if self.weights in ("int4", "int8", AUTO) else "rtn")
        by_integers = self.weights in ("int4", "int8", AUTO, OWN) and "cpu" in devices
        activations = self.activations or ("int8" if by_integers else NONE)
        return replace(self, algorithm=algorithm, activations=activations)

    def grid(self, format: str) -> Grid:
        """Of int4, int8 or fp8, with the group that was asked for where the format has it."""
        format = "int8" if format == OWN else format  # what a rule may ask for beside it
        sizes = GROUPS[format]
        size = sizes[0] if self.group is None or self.group not in sizes else self.group
        dtype = {"int4": DType.U4, "int8": DType.I8, "fp8": DType.F8E4M3}[format]
        symmetric = self.symmetric or format != "int4"
        return Grid(dtype, size, symmetric, DType.F16 if size else DType.F32)

    @property
    def bits_per_weight(self) -> float | None:
        """Of most matrices, with scales, once they are quantised; None where they are not."""
        if self.weights == NONE:
            return None
        return self.grid("int4" if self.weights == AUTO else self.weights).bits_per_weight(TYPICAL)

    def format_of(self, paths: Sequence[str], otherwise: str | None = None) -> str:
        """int4, int8, fp8 or none, for a matrix whose modules have these paths.

        otherwise: where no rule names it; None: as all are.
        """
        for rule in self.keep:
            pattern, _, format = rule.partition("=")
            if any(matches(pattern, path) for path in paths):
                return format or NONE
        return otherwise or {AUTO: "int4", OWN: NONE}.get(self.weights, self.weights)

    def limit(self) -> float:
        """The mean KL past which a compile is refused."""
        if self.max_kl is not None:
            return self.max_kl
        return MAX_KL.get(self.weights, 0.0) + MAX_KL_KV.get(self.kv or "f32", 0.0) + 0.02


def matches(pattern: str, path: str) -> bool:
    """Whether a module, or one that it is part of, is named by the pattern."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def check_quantization(q: Quantization) -> None:
    """Raises CompileError on a value that no compile has."""
    _check_choice("--quantize", q.weights, WEIGHTS)
    _check_choice("--algorithm", q.algorithm, ALGORITHMS)
    _check_choice("--activations", q.activations, ACTIVATIONS)
    _check_choice("--kv", q.kv, KV)
    sizes = GROUPS["int4" if q.weights == AUTO else q.weights] if q.weights in (*GROUPS, AUTO) else ()
    if q.group is not None and q.group not in sizes:
        known = f"{q.weights} has groups of {', '.join(map(str, sizes))}" if sizes else "Give --quantize too"
        known = "Leave it out: the groups are the checkpoint's" if q.weights == OWN else known
        what = "not a group's size" if sizes else "no weights are rounded in groups"
        raise CompileError(what, where=f"--group {q.group}", todo=known)
    if q.algorithm in ("gptq", "awq") and q.weights == "fp8":
        todo = "Leave it out: fp8 is rounded to the nearest"
        raise CompileError("nothing is fitted", where=f"--algorithm {q.algorithm}", todo=todo)
    if q.algorithm is not None and q.weights == OWN:
        todo = "Leave it out: the codes are the checkpoint's"
        raise CompileError("nothing is fitted", where=f"--algorithm {q.algorithm}", todo=todo)
    if not q.symmetric and q.weights not in ("int4", AUTO):
        todo = "Leave out --asymmetric, or give --quantize int4"
        raise CompileError("only int4 has an asymmetric grid", where="--asymmetric", todo=todo)
    if q.max_kl is not None and not 0 <= q.max_kl < float("inf"):
        raise CompileError(
            "no bound", where=f"--max-kl {q.max_kl}", todo="Give a number of nats, such as 0.1"
        )
    _check_useless(q)
    for rule in q.keep:
        _check_rule(rule)
    if q.calibration is not None:
        _check_calibration(q, q.calibration)


def _check_useless(q: Quantization) -> None:
    """An option that would do nothing is a mistake."""
    if q.keep and q.weights == NONE:
        raise CompileError("nothing is quantised", where="--keep", todo="Give --quantize too")
    if q.algorithm is not None and q.weights == NONE:
        raise CompileError(
            "nothing is quantised", where=f"--algorithm {q.algorithm}", todo="Give --quantize too"
        )
    if q.quantizes_activations and not q.formats & BESIDE[q.activations or NONE]:
        todo = f"Leave it out, or give --quantize {'fp8' if q.activations == 'fp8' else 'int4 or int8'}"
        what = "no weights are quantised that it goes with"
        raise CompileError(what, where=f"--activations {q.activations}", todo=todo)
    if q.max_kl is not None and not q.any:
        raise CompileError(
            "nothing is quantised", where=f"--max-kl {q.max_kl}", todo="Give --quantize or --kv too"
        )


def _check_calibration(q: Quantization, path: Path) -> None:
    """Before the import, which takes a while."""
    if not q.resolved(("cpu",)).calibrates and q.kv not in SHARED_KEYS:
        todo = "Leave it out, or give --quantize int4, say"
        raise CompileError("nothing is fitted to text", where=f"--calibration {path}", todo=todo)
    read_text(path)


def _check_choice(option: str, given: str | None, known: Sequence[str]) -> None:
    if given is not None and given not in known:
        raise CompileError("unknown", where=f"{option} {given}", todo=f"There are {', '.join(known)}")


def _check_rule(rule: str) -> None:
    pattern, equals, format = rule.partition("=")
    if not pattern or (equals and format not in (*GROUPS, NONE)):
        todo = f"Give PATTERN, or PATTERN=FORMAT with one of {', '.join((*GROUPS, NONE))}"
        raise CompileError("no rule for a module", where=f"--keep {rule}", todo=todo)
