"""Quantise the matrices of linears and tables of embeddings: each becomes `dequantize` of codes and scales.

Where calibration has found codes, those are read; else the matrix is rounded to the nearest when weights are
packed (`quantize_weight`). A matrix that an embedding and a linear share is quantised once, for both. A
checkpoint's own codes are left as they are. So is, unless a rule names it, what chooses among experts: the
matrix is small, and another choice is another function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ir.build import trim
from ir.graph import Arg, Graph, Op, Value, Weight
from ir.ops.quantize import STATIC, SYMMETRIC_ZERO
from ir.rewrite import Miss, Replacement, Rule, View, rewrite
from ir.types import DType
from passes.base import Pass, Result
from passes.linears import LINEARS, experts_of
from passes.match import shape
from passes.routers import routers

NONE = "none"
MATRIX_OPS = (*LINEARS, "embed")  # their operand 1 is the matrix
# Of a value in a check, as a share of its RMS: it finds what is broken; KL says how good the codes are.
_ERROR = {"u4": 1.0, "i8": 0.05, "f8e4m3": 0.25}


@dataclass(frozen=True)
class Codes:
    """A matrix that was quantised already: arrays of a store of weights, as `dequantize` reads them.

    input_scale: [K], which the linear's input is multiplied by first; None: it is not.
    """

    q: Weight
    scale: Weight
    zero: Weight | int
    offset: Weight | None
    group_size: int
    input_scale: Weight | None = None


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """dtype: of the codes, u4, i8 or f8e4m3, or "none". tables: of what embeddings read, "" the same.

    keep: patterns of module paths whose matrices stay floats; overrides: "PATTERN=DTYPE", the first that
    fits. A path is that of the linear, or of a weight that it is made of without its last part, but for a
    stack of experts' matrices, which has a name of its own. calibrated: codes by the matrix's name.
    """

    dtype: str = NONE
    group_size: int = 32
    symmetric: bool = True
    tables: str = ""
    keep: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    calibrated: Mapping[str, Codes] = field(default_factory=dict[str, Codes])

    def __post_init__(self) -> None:
        asked = (self.dtype, self.tables or NONE, *(o.rpartition("=")[2] for o in self.overrides))
        for dtype in asked:
            if dtype != NONE and dtype not in STATIC:
                raise ValueError(
                    f"quantize_weights: there are no codes of {dtype!r}; there are {', '.join(STATIC)}"
                )
        if self.group_size < 0:
            raise ValueError(f"quantize_weights: group_size must not be negative: {self.group_size}")

    @property
    def tolerance(self) -> float:
        return _ERROR.get(self.dtype, 0.0)

    def run(self, graph: Graph) -> Result:
        matrices = find_matrices(graph)
        formats = {arg: self.format_of(users) for arg, users in matrices.items()}
        chosen = {arg: found for arg, found in formats.items() if found != NONE}
        kept = tuple(
            Miss(self.name, users[0].op, self.why_kept(users))
            for arg, users in matrices.items()
            if formats[arg] == NONE and self.dtype != NONE
        )
        done = rewrite(graph, (Rule("quantize weight", MATRIX_OPS, _Quantizer(self, chosen).apply),))
        return Result(done.graph, done.count, (*done.misses, *kept))

    def format_of(self, users: Iterable[MatrixUse]) -> str:
        """Of a matrix by all ops that read it: one that one of them is to keep is kept."""
        users = tuple(users)
        paths = {path for use in users for path in use.paths}
        if self.is_to_stay(paths):
            return NONE
        for override in self.overrides:
            pattern, _, dtype = override.rpartition("=")
            if any(fnmatchcase(path, pattern) for path in paths):
                return dtype
        if any(use.routes for use in users):
            return NONE
        is_table = any(use.op.kind == "embed" for use in users)
        return self.tables if is_table and self.tables and self.dtype != NONE else self.dtype

    def is_to_stay(self, paths: Iterable[str]) -> bool:
        return any(fnmatchcase(path, pattern) for path in paths for pattern in self.keep)

    def why_kept(self, users: Iterable[MatrixUse]) -> str:
        users = tuple(users)
        asked = self.is_to_stay(path for use in users for path in use.paths)
        routes = not asked and any(use.routes for use in users)
        return "it chooses among experts" if routes else "its module is to stay as it is"


@dataclass(frozen=True)
class MatrixUse:
    """An op that reads a matrix, and the module paths that the matrix may be called by.

    routes: whether its results choose among experts.
    """

    op: Op
    paths: tuple[str, ...]
    routes: bool = False

    @property
    def place(self) -> str:
        """The path to show: its module's, or a stack of experts' own, of which a module has several."""
        is_stack = experts_of(self.op) is not None and len(self.paths) == 2  # its module and one weight
        return self.paths[1 if is_stack else 0]


def find_matrices(graph: Graph) -> dict[Value | Weight, list[MatrixUse]]:
    """Constant matrices of floats that are not quantised yet, and what reads them."""
    constants, makers, routing = graph.constants(), graph.producers(), routers(graph)
    found: dict[Value | Weight, list[MatrixUse]] = {}
    for op in graph.ops:
        arg = op.args[1] if op.kind in MATRIX_OPS else None
        is_constant = isinstance(arg, Weight) or (isinstance(arg, Value) and arg.name in constants)
        if not isinstance(arg, Value | Weight) or not is_constant or reads_codes(arg, makers):
            continue
        stacked = experts_of(op) is not None
        modules = (_module(name, stacked=stacked) for name in _weights(arg, makers))
        use = MatrixUse(op, tuple(dict.fromkeys((op.loc, *modules))), op.outs[0].name in routing)
        found.setdefault(arg, []).append(use)
    return found


def _module(name: str, *, stacked: bool) -> str:
    """Of a weight. A stack of experts' matrices is one of several that its module holds itself."""
    module, _, last = name.rpartition(".")
    return name if stacked and last != "weight" else module


def reads_codes(arg: Arg, makers: Mapping[str, Op]) -> bool:
    """Whether a matrix is made of codes, if only in part."""
    op = makers.get(arg.name) if isinstance(arg, Value) else None
    return op is not None and (op.kind == "dequantize" or any(reads_codes(a, makers) for a in op.args))


def _weights(arg: Arg, makers: Mapping[str, Op]) -> list[str]:
    if isinstance(arg, Weight):
        return [arg.name]
    op = makers.get(arg.name) if isinstance(arg, Value) else None
    return [] if op is None else [name for a in op.args for name in _weights(a, makers)]


class _Quantizer:
    """The rule: what a matrix op reads instead of its matrix."""

    def __init__(self, asked: QuantizeWeights, chosen: Mapping[Value | Weight, str]) -> None:
        self.asked, self.chosen = asked, chosen

    def apply(self, op: Op, view: View) -> Replacement | Miss | None:
        matrix = op.args[1]
        if not isinstance(matrix, Value | Weight) or matrix not in self.chosen:
            return None
        codes = self.asked.calibrated.get(matrix.name)
        if codes is not None and codes.input_scale is not None and op.kind == "embed":
            return None
        found = self.rounded(matrix, view) if codes is None else _dequantized(codes, view)
        x = op.args[0]
        if codes is not None and codes.input_scale is not None:
            x = view.op("mul", x, codes.input_scale)
        return view.op(op.kind, x, found, *op.args[2:], **op.attrs)

    def rounded(self, matrix: Value | Weight, view: View) -> Value:
        dtype, size = DType(self.chosen[matrix]), self.asked.group_size
        symmetric = self.asked.symmetric or dtype is not DType.U4
        scale = "f32" if dtype is DType.F8E4M3 else "f16"
        width = shape(matrix)[-1]
        size = 0 if dtype is DType.F8E4M3 or (isinstance(width, int) and size >= width) else size
        q, scales, *offset = view.ops(
            "quantize_weight", matrix, dtype=str(dtype), group_size=size, symmetric=symmetric, scale=scale
        )
        zero = SYMMETRIC_ZERO if dtype is DType.U4 and symmetric else 0
        rest = (None, *offset) if offset else ()
        return view.op("dequantize", q, scales, *rest, group_size=size, zero=zero)


def _dequantized(codes: Codes, view: View) -> Value:
    zero = codes.zero if isinstance(codes.zero, Weight) else None
    args = trim([codes.q, codes.scale, zero, codes.offset])
    number = codes.zero if isinstance(codes.zero, int) else 0
    return view.op("dequantize", *args, group_size=codes.group_size, zero=number)
