"""The quantised matrices of a checkpoint directory, by the quantization_config of its config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.importers.quantized import awq, compressed, gptq
from compiler.importers.quantized.matrix import Matrix
from compiler.importers.quantized.source import MatrixSource
from compiler.importers.quantized.stored import Stored, unread
from compiler.weights import WeightSource
from ir.types import DType
from runtime.errors import shorten

METHODS = ("gptq", "awq", "compressed-tensors")
_CODES = (DType.I8, DType.U8, DType.F8E4M3)
Make = Callable[[Stored], Matrix]


def quantized_source(source: WeightSource, config: Any, where: str) -> MatrixSource:
    """source with its quantised matrices under their weights' names. config: the quantization_config.

    Raises ImportRefused on a method or format that is not read, WeightError on a matrix that is malformed.
    """
    make, parts = _method(config, f"{where}/config.json")
    names = frozenset(source.names)
    modules = {n.rpartition(".")[0] for n in names if n.rpartition(".")[2] in parts}
    coded = {n.rpartition(".")[0] for n in names if n.endswith(".weight") and source.type(n).dtype in _CODES}
    stored = [Stored(source, names, module, where) for module in sorted(modules | coded)]
    hidden = frozenset(f"{module}.{part}" for module in modules for part in parts) & names
    return MatrixSource(source, {f"{s.module}.weight": make(s) for s in stored}, hidden)


def check_method(config: Any, where: str) -> None:
    """Raises ImportRefused on a quantization_config that is not read."""
    _method(config, where)


def _method(config: Any, where: str) -> tuple[Make, tuple[str, ...]]:
    """What makes a matrix of what is stored, and the last names of the arrays that tell of one."""
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method == "gptq":
        sizes, added = gptq.settings(config, where)
        return lambda stored: gptq.Gptq(stored, sizes, added), gptq.PARTS
    if method == "awq":
        size = awq.settings(config, where)
        return lambda stored: awq.Awq(stored, size), awq.PARTS
    if method in ("compressed-tensors", "compressed_tensors"):
        schemes = compressed.settings(config, where)
        return lambda stored: compressed.Compressed(stored, schemes), compressed.PARTS
    raise unread(f"{shorten(str(method))}", f"{', '.join(METHODS)} are read", where)
