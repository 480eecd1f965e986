"""Which of a model's arrays are quantised matrices of the checkpoint, or put together from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from compiler.importers.converted import ConvertedSource
from compiler.importers.placeholders import Names
from compiler.importers.quantized.joined import Unlike, joined
from compiler.importers.quantized.matrix import Matrix
from compiler.importers.quantized.source import QuantizedSource
from compiler.importers.quantized.stored import ORIGINAL
from compiler.importers.refused import ImportRefused
from compiler.importers.stored_names import StoredNames
from ir.graph import Graph, Weight
from runtime.errors import shown


@dataclass(frozen=True)
class OwnGrids:
    """By the graph's names: matrices, of a stack [E,N,K] all rows as one, and why others are floats.

    odd: matrices of which the module does not tell the layout, and the name of its class.
    """

    matrices: dict[str, Matrix] = field(default_factory=dict[str, Matrix])
    odd: dict[str, str] = field(default_factory=dict[str, str])
    floats: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def note(self) -> Iterator[str]:
        """One line on the others, if there are any."""
        if self.floats:
            name, why = next(iter(self.floats.items()))
            count = f"{len(self.floats)} array{'s' if len(self.floats) > 1 else ''} of quantised matrices"
            yield f"{count} {'are' if len(self.floats) > 1 else 'is'} read as floats: of {shown(name)} {why}"


def own_grids(
    model: Any,
    names: Names,
    stored: StoredNames,
    weights: QuantizedSource,
    converted: ConvertedSource | None,
) -> OwnGrids:
    """converted: None where arrays that are put together do not matter."""
    found, shapes = OwnGrids(), {name: tuple(array.shape) for name, array in model.state_dict().items()}
    for own in stored.own:
        try:
            matrix = _matrix(own, stored, weights, converted)
        except Unlike as error:
            found.floats[names[own]] = str(error)
            continue
        if matrix is not None:
            found.matrices[names[own]] = matrix
            module = model.get_submodule(own.rpartition(".")[0])
            if not _is_rows(module, shapes[own], matrix):
                found.odd[names[own]] = type(module).__name__
    return found


def _matrix(
    own: str, stored: StoredNames, weights: QuantizedSource, converted: ConvertedSource | None
) -> Matrix | None:
    if own in stored.plain:
        return weights.matrix(stored.plain[own])
    if converted is None or not any(weights.matrix(s.name) for s in stored.converted[own].sources):
        return None
    return joined(converted.row_parts(own), weights.matrix)


def _is_rows(module: Any, shape: tuple[int, ...], matrix: Matrix) -> bool:
    """Whether the module of an array is known to have it as [outputs, inputs], or a stack of such."""
    import torch

    if len(shape) == 3:
        return (shape[0] * shape[1], shape[2]) == matrix.grid.shape
    return isinstance(module, torch.nn.Linear | torch.nn.Embedding)


def check_readers(graph: Graph, grids: OwnGrids, where: str) -> None:
    """Of other modules' matrices, linears must be all that reads them: a square one may be transposed there.

    Raises ImportRefused.
    """
    for op in graph.ops:
        for i, arg in enumerate(op.args):
            if isinstance(arg, Weight) and arg.name in grids.odd and (op.kind, i) != ("linear", 1):
                what = f"a quantised matrix of a {grids.odd[arg.name]}; those that linears and embeddings "
                raise ImportRefused(
                    f"{what}read are read", where=f"{where}, tensor {arg.name!r}", todo=ORIGINAL
                )
