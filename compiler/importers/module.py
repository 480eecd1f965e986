"""An in-memory torch.nn.Module, torch.fx.GraphModule or ExportedProgram -> the IR.

The module's forward takes token ids [1,S] and, optionally, positions [1,S], and gives logits [1,S,V] (a
tensor, a tuple that starts with one, or a mapping or object with `logits`). Models of transformers are
modules too. Attention written as matmul, softmax,
matmul stays plain ops for fuse_attention to recognise; scaled_dot_product_attention becomes the attention
op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from compiler.importers.aten import SUPPORTED, import_program
from compiler.importers.borrowed import (
    as_float32,
    attention_implementation,
    evaluating,
    flags_of_sizes,
    transformers_models,
)
from compiler.importers.calls import Call, call_by_example, call_by_signature
from compiler.importers.experts import expert_markers
from compiler.importers.export import (
    EXAMPLE_LENGTH,
    check_guards,
    export_program,
    functionalize,
    symbol_bounds,
)
from compiler.importers.markers import NAME, attention_markers, one_sequence
from compiler.importers.model import Imported, ModelInfo
from compiler.importers.placeholders import Names, constants_of, program_of, to_numpy
from compiler.importers.recurrences import recurrence_markers
from compiler.importers.refused import ImportRefused
from compiler.weights import ArraySource, LayeredSource, check_weights, read_as
from ir.interpret import interpret
from ir.types import Tensor

Examples = Sequence[Any] | Mapping[str, Any] | None

NUM_PROBES = 8  # token ids that are tried where a module branches on a length of 1
PROBE_ERROR, PROBE_ERROR_HALF = 1e-4, 0.1  # of the logits' standard deviation


def load_module(source: Any, max_context: int | None = None, examples: Examples = None) -> Imported:
    """Import a torch.nn.Module or an ExportedProgram. Raises ImportRefused.

    examples: arguments of a call of a module, by place or by keyword; None where its signature tells them.
    """
    import torch

    if isinstance(source, torch.export.ExportedProgram):
        if examples is not None:
            todo = "Leave them out: the program has been traced"
            raise ImportRefused("example_inputs of an exported program", where="source", todo=todo)
        return load_program(source, max_context)
    if not isinstance(source, torch.nn.Module):
        raise ImportRefused(
            f"cannot import a {type(source).__name__}",
            where="source",
            todo="Give a checkpoint directory, a .gguf file, a torch.nn.Module, or a "
            "torch.export.ExportedProgram",
        )
    if isinstance(source, torch.fx.GraphModule) and not any(True for _ in source.parameters()):
        raise ImportRefused(
            "a graph without its weights, which are among its inputs",
            where=type(source).__name__,
            todo="Give the exported program that it is of, or that program's .module()",
        )
    if max_context is None:
        raise ImportRefused(
            "a module does not say how long its sequences may be",
            where=type(source).__name__,
            todo="Give max_context=N",
        )
    call = call_by_signature(source) if examples is None else call_by_example(source, examples)
    names, alone = Names(source), list[ImportRefused]()
    with evaluating(source):
        with as_float32(source):
            program = export_module(source, call, max_context, alone)
        imported = _imported(program, source, names, max_context, type(source).__name__, wrapper="model")
        if alone and not agrees_at_length_one(source, call, imported):
            raise alone[0]
    return imported


def export_module(module: Any, call: Call, context: int, alone: list[ImportRefused]) -> Any:
    """The exported program. What is transformers' in it calls our attention function, if it can.

    alone: gets the refusal of what the module does otherwise at length 1 alone.
    """
    models = transformers_models(module)
    if models:
        with one_sequence(), expert_markers(), attention_markers(module) as markers:
            with attention_implementation(models, NAME), recurrence_markers(module, markers.recurrence):
                program = _export(module, call, context, alone)
        if markers.complete():
            return program
        alone.clear()
    with ExitStack() as stack:
        if models:
            stack.enter_context(one_sequence())
            stack.enter_context(expert_markers())
        stack.enter_context(attention_implementation(models, "eager"))
        stack.enter_context(recurrence_markers(module))
        return _export(module, call, context, alone)


def _export(module: Any, call: Call, context: int, alone: list[ImportRefused]) -> Any:
    import torch

    with torch.no_grad(), flags_of_sizes():
        args = _zeros(module, call, EXAMPLE_LENGTH)
        return export_program(_as_logits(module, call), args, context, SUPPORTED, alone)


def _zeros(module: Any, call: Call, length: int) -> tuple[Any, ...]:
    """Ids and, if they are taken, positions [1, length]."""
    import torch

    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    return tuple(
        torch.zeros((1, length), dtype=torch.long, device=device) for _ in range(1 + call.takes_positions)
    )


def agrees_at_length_one(module: Any, call: Call, imported: Imported) -> bool:
    """Whether the graph gives the module's own logits of single tokens: modules that leave their mask out
    there branch on the length, which the traced graph does not."""
    import torch

    weights = {w.name: w for w in imported.graph.weights}
    run = _as_logits(module, call)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
    for token in np.linspace(0, imported.info.vocab_size - 1, NUM_PROBES).astype(int).tolist():
        args = _zeros(module, call, 1)
        args[0].fill_(token)
        with torch.no_grad():
            expected = run(*args).float().cpu().numpy()
        inputs = {"ids": np.array([[token]], np.int32), "pos": np.zeros((1, 1), np.int32)}
        found = interpret(imported.graph, inputs, lambda n: read_as(imported.weights, weights[n])).outputs[0]
        error = np.abs(found - expected).max() / max(float(expected.std()), 1e-30)
        if not error <= (PROBE_ERROR_HALF if half else PROBE_ERROR):
            return False
    return True


def load_program(program: Any, max_context: int | None = None) -> Imported:
    """Import an ExportedProgram of forward(ids[, pos]) whose length is dynamic. Raises ImportRefused."""
    context = max_context or symbol_bounds(program)
    if context is None:
        raise ImportRefused(
            "it has no upper bound for its length",
            where="exported program",
            todo="Give max_context=N, or export it with torch.export.Dim('S', max=N)",
        )
    check_guards(program, context)
    program = functionalize(program, SUPPORTED)
    names = Names(program.module())
    return _imported(program, program.module(), names, context, "module", wrapper="")


def _imported(program: Any, module: Any, names: Names, context: int, name: str, wrapper: str) -> Imported:
    lines: dict[str, str] = {}
    graph = import_program(program_of(program, names, context, name, wrapper), lines)
    used = {w.name for w in graph.weights}
    parameters = {n: t for n, t in module.named_parameters(remove_duplicate=False) if n in used}
    arrays = ArraySource({n: to_numpy(t) for n, t in parameters.items()})
    constants = constants_of(module, names, graph)
    weights = LayeredSource((arrays, constants))
    check_weights(graph, weights)
    logits = graph.outputs[0].type
    assert isinstance(logits, Tensor)
    info = ModelInfo(name=name, vocab_size=int(logits.shape[2]), max_context=context, source_kind="module")
    return Imported(graph, weights, info, lines=lines, constants=constants.names)


def _as_logits(module: Any, call: Call) -> Any:
    """The module as forward(ids[, pos]), giving logits alone."""
    import torch

    class Ids(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, ids: Any) -> Any:
            return call.logits(module, ids, None)

    class IdsAndPositions(Ids):
        def forward(self, ids: Any, pos: Any) -> Any:
            return call.logits(module, ids, pos)

    made = IdsAndPositions() if call.takes_positions else Ids()
    made.training = False  # its module has its own mode: that of an exported program cannot be changed
    return made
