"""An in-memory torch.nn.Module or ExportedProgram -> the IR.

The module's forward takes token ids [1,S] and, optionally, positions [1,S], and gives logits [1,S,V] (a
tensor, a tuple that starts with one, or an object with `.logits`). Attention written as matmul, softmax,
matmul stays plain ops for fuse_attention to recognise; scaled_dot_product_attention becomes the attention
op.
"""

from __future__ import annotations

import inspect
from typing import Any

from compiler.importers.aten import SUPPORTED, import_program
from compiler.importers.export import (
    EXAMPLE_LENGTH,
    check_guards,
    export_program,
    functionalize,
    symbol_bounds,
)
from compiler.importers.model import Imported, ModelInfo
from compiler.importers.placeholders import Names, constants_of, program_of, to_numpy
from compiler.importers.refused import ImportRefused
from compiler.weights import ArraySource, LayeredSource, check_weights
from ir.types import Tensor


def load_module(source: Any, max_context: int | None = None) -> Imported:
    """Import a torch.nn.Module or an ExportedProgram. Raises ImportRefused."""
    import torch

    if isinstance(source, torch.export.ExportedProgram):
        return load_program(source, max_context)
    if not isinstance(source, torch.nn.Module):
        raise ImportRefused(
            f"cannot import a {type(source).__name__}: give a checkpoint directory, a .gguf file, "
            "a torch.nn.Module, or a torch.export.ExportedProgram"
        )
    if max_context is None:
        raise ImportRefused("a module does not say how long its sequences may be: give max_context")
    training = source.training
    try:
        return _load(source.eval(), max_context)
    finally:
        source.train(training)


def _load(module: Any, context: int) -> Imported:
    import torch

    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    positions = takes_positions(module)
    example = tuple(
        torch.zeros((1, EXAMPLE_LENGTH), dtype=torch.long, device=device) for _ in range(1 + positions)
    )
    with torch.no_grad():
        program = export_program(_logits_only(module, positions), example, context, SUPPORTED)
    names = Names(module)
    return _imported(program, module, names, context, type(module).__name__, wrapper="model")


def load_program(program: Any, max_context: int | None = None) -> Imported:
    """Import an ExportedProgram of forward(ids[, pos]) whose length is dynamic. Raises ImportRefused."""
    context = max_context or symbol_bounds(program)
    if context is None:
        raise ImportRefused(
            "the exported program has no upper bound for its length: give max_context, or export it with "
            "torch.export.Dim('S', max=...)"
        )
    check_guards(program, context)
    program = functionalize(program, SUPPORTED)
    names = Names(program.module())
    return _imported(program, program.module(), names, context, "module", wrapper="")


def _imported(program: Any, module: Any, names: Names, context: int, name: str, wrapper: str) -> Imported:
    graph = import_program(program_of(program, names, context, name, wrapper))
    used = {w.name for w in graph.weights}
    parameters = {n: t for n, t in module.named_parameters(remove_duplicate=False) if n in used}
    arrays = ArraySource({n: to_numpy(t) for n, t in parameters.items()})
    weights = LayeredSource((arrays, constants_of(module, names, graph)))
    check_weights(graph, weights)
    logits = graph.outputs[0].type
    assert isinstance(logits, Tensor)
    info = ModelInfo(name=name, vocab_size=int(logits.shape[2]), max_context=context, source_kind="module")
    return Imported(graph, weights, info)


def takes_positions(module: Any) -> bool:
    """Whether forward takes positions after the ids: a second parameter that is required or is called so."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not positional:
        raise ImportRefused(f"{type(module).__name__}.forward takes no token ids")
    required = [p for p in positional[1:] if p.default is p.empty]
    if len(required) > 1:
        raise ImportRefused(
            f"{type(module).__name__}.forward needs {required[1].name!r} besides ids and positions: wrap it "
            "in a module whose forward takes ids [1,S] and, if it needs them, positions [1,S]"
        )
    return bool(required) or (
        len(positional) > 1 and positional[1].name in ("pos", "positions", "position_ids")
    )


def _logits_only(module: Any, positions: bool) -> Any:
    """The module, giving logits alone whatever it wraps them in."""
    import torch

    def logits(out: Any) -> Any:
        out = getattr(out, "logits", out)
        return out[0] if isinstance(out, tuple | list) else out

    class Ids(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, ids: Any) -> Any:
            return logits(self.model(ids))

    class IdsAndPositions(Ids):
        def forward(self, ids: Any, pos: Any) -> Any:
            return logits(self.model(ids, pos))

    return (IdsAndPositions() if positions else Ids()).eval()
