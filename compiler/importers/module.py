"""An in-memory torch.nn.Module, torch.fx.GraphModule or ExportedProgram -> the IR.

The module's forward takes token ids [1,S] and, optionally, positions [1,S], and gives logits [1,S,V] (a
tensor, a tuple that starts with one, or a mapping or object with `logits`). Models of transformers are
modules too. Attention written as matmul, softmax,
matmul stays plain ops for fuse_attention to recognise; scaled_dot_product_attention becomes the attention
op.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
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
from compiler.importers.refused import ImportRefused
from compiler.weights import ArraySource, LayeredSource, check_weights, read_as
from ir.interpret import interpret
from ir.types import Tensor

IDS = ("ids", "input_ids", "tokens", "idx", "x")
POSITIONS = ("pos", "positions", "position_ids", "input_pos")

WRAP = "Wrap it in a module whose forward takes ids [1,S] and, if it needs them, positions [1,S]"

NUM_PROBES = 8  # token ids that are tried where a module branches on a length of 1
PROBE_ERROR, PROBE_ERROR_HALF = 1e-4, 0.1  # of the logits' standard deviation


def load_module(source: Any, max_context: int | None = None) -> Imported:
    """Import a torch.nn.Module or an ExportedProgram. Raises ImportRefused."""
    import torch

    if isinstance(source, torch.export.ExportedProgram):
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
    names, alone = Names(source), list[ImportRefused]()
    with evaluating(source):
        with as_float32(source):
            program = export_module(source, max_context, alone)
        imported = _imported(program, source, names, max_context, type(source).__name__, wrapper="model")
        if alone and not agrees_at_length_one(source, imported):
            raise alone[0]
    return imported


def export_module(module: Any, context: int, alone: list[ImportRefused]) -> Any:
    """The exported program. What is transformers' in it calls our attention function, if it can.

    alone: gets the refusal of what the module does otherwise at length 1 alone.
    """
    models = transformers_models(module)
    if models:
        with one_sequence(), expert_markers(), attention_markers(module) as markers:
            with attention_implementation(models, NAME):
                program = _export(module, context, alone)
        if markers.calls == markers.expected() > 0:
            return program
        alone.clear()
    with ExitStack() as stack:
        if models:
            stack.enter_context(one_sequence())
            stack.enter_context(expert_markers())
        stack.enter_context(attention_implementation(models, "eager"))
        return _export(module, context, alone)


def _export(module: Any, context: int, alone: list[ImportRefused]) -> Any:
    import torch

    call = calling(module)
    with torch.no_grad(), flags_of_sizes():
        args = _zeros(module, call, EXAMPLE_LENGTH)
        return export_program(_logits_only(module, call), args, context, SUPPORTED, alone)


def _zeros(module: Any, call: Call, length: int) -> tuple[Any, ...]:
    """Ids and, if they are taken, positions [1, length]."""
    import torch

    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    return tuple(torch.zeros((1, length), dtype=torch.long, device=device) for _ in range(1 + call.positions))


def agrees_at_length_one(module: Any, imported: Imported) -> bool:
    """Whether the graph gives the module's own logits of single tokens: modules that leave their mask out
    there branch on the length, which the traced graph does not."""
    import torch

    call, weights = calling(module), {w.name: w for w in imported.graph.weights}
    run = _logits_only(module, call)
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


@dataclass(frozen=True)
class Call:
    """How a module's forward is called. ids, pos: the keyword, or None where it is given by place."""

    ids: str | None
    positions: bool
    pos: str | None
    options: Mapping[str, Any]


def calling(module: Any) -> Call:
    """From the signature: ids come first or by a name of theirs; positions are given if they are required, or
    come second under a name of theirs. Raises ImportRefused on what else is required."""
    given = list(inspect.signature(module.forward).parameters.values())
    named = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in given if p.kind is p.KEYWORD_ONLY]
    first = named[0] if named else next((p for p in keywords if p.name in IDS), None)
    if first is None and all(p.kind is not p.VAR_POSITIONAL for p in given):
        raise ImportRefused("it takes no token ids", where=f"{type(module).__name__}.forward", todo=WRAP)
    others = [p for p in (*named, *keywords) if p is not first]
    required = [p for p in others if p.default is p.empty]
    pos = next((p for p in others if p.name in POSITIONS and (p in required or p is others[0])), None)
    if pos is None and required and required[0] in named[1:2]:
        pos = required[0]
    refused = next((p for p in required if p is not pos), None)
    if refused is not None:
        what = f"it needs {refused.name!r} besides ids and positions"
        raise ImportRefused(what, where=f"{type(module).__name__}.forward", todo=WRAP)
    options = {p.name: False for p in others if p.name == "use_cache"}
    return Call(_keyword(first), pos is not None, None if pos in named[1:2] else _keyword(pos), options)


def _keyword(parameter: inspect.Parameter | None) -> str | None:
    by_name = parameter is not None and parameter.kind is parameter.KEYWORD_ONLY
    return parameter.name if parameter is not None and (by_name or parameter.name in POSITIONS) else None


def _logits_only(module: Any, call: Call) -> Any:
    """The module as forward(ids[, pos]), giving logits alone whatever it wraps them in."""
    import torch

    def run(ids: Any, pos: Any = None) -> Any:
        args, kwargs = [], dict(call.options)
        for value, name in ((ids, call.ids), (pos, call.pos)):
            if name is not None:
                kwargs[name] = value
            elif value is not None:
                args.append(value)
        return _logits(module(*args, **kwargs))

    class Ids(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, ids: Any) -> Any:
            return run(ids)

    class IdsAndPositions(Ids):
        def forward(self, ids: Any, pos: Any) -> Any:
            return run(ids, pos)

    made = IdsAndPositions() if call.positions else Ids()
    made.training = False  # its module has its own mode: that of an exported program cannot be changed
    return made


def _logits(out: Any) -> Any:
    """Logits from a tensor, a tuple that starts with them, or a mapping or object that names them."""
    if isinstance(out, Mapping) and "logits" in out:
        return out["logits"]
    out = getattr(out, "logits", out)
    return out[0] if isinstance(out, tuple | list) else out
