"""What an exported program's placeholders stand for: weights by name, literals, or the graph's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.importers.aten import Program
from compiler.importers.aten_complex import Pair
from compiler.importers.context import torch_dtype
from compiler.importers.refused import OTHER_OPS, ImportRefused
from compiler.weights import BELONG, ArraySource
from ir.graph import Graph, Scalar, Weight
from ir.types import Tensor

INPUTS = ("ids", "pos")


class Names:
    """One name per array of a module: tied parameters have the name under which the checkpoint stores them.

    stored: from the model's own name of an array to the checkpoint's.
    """

    def __init__(self, model: Any, stored: Mapping[str, str] | None = None) -> None:
        self.tensors: dict[str, Any] = {
            **dict(model.named_buffers(remove_duplicate=False)),
            **dict(model.named_parameters(remove_duplicate=False)),
        }
        self.stored = dict(stored or {})
        self._name: dict[str, str] = {}
        groups: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(id(tensor), []).append(name)
        for group in groups.values():
            self._name.update(dict.fromkeys(group, next((n for n in group if n in self.stored), group[0])))

    def move_buffers(self, model: Any) -> None:
        """Put the model's buffers where its parameters are, on the meta device; their values stay here."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")

    @property
    def renames(self) -> dict[str, str]:
        """The names that the checkpoint spells otherwise."""
        return {name: stored for name, stored in self.stored.items() if name != stored}

    def __getitem__(self, name: str) -> str:
        return self._name.get(name, name)


def program_of(program: Any, names: Names, context: int, name: str, wrapper: str = "") -> Program:
    """An ExportedProgram as import_program wants it. wrapper: the attribute that holds the model."""
    kinds = type(program.graph_signature.input_specs[0].kind)
    placeholders: dict[str, Any] = {}
    inputs = iter(INPUTS)
    for spec in program.graph_signature.input_specs:
        if spec.kind is kinds.USER_INPUT:
            placeholders[spec.arg.name] = next(inputs)
            continue
        if spec.target is None:
            what = "the model has an op with side effects, which a compiled graph cannot have"
            raise ImportRefused(what, where="exported program", todo=OTHER_OPS)
        target = str(spec.target)
        value = program.constants.get(target)
        path = target.removeprefix(f"{wrapper}.") if wrapper else target
        placeholders[spec.arg.name] = _constant(
            names, path, program.state_dict.get(target) if value is None else value
        )
    return Program(program.graph.nodes, placeholders, context, name, wrapper)


def _constant(names: Names, path: str, tensor: Any) -> Weight | Scalar | Pair:
    """A weight, a literal where it is a constant of one element that is not stored, or two weights where it
    is complex."""
    if tensor is None:
        what = f"no value or shape for {path!r}"
        raise ImportRefused(what, where="exported program", todo="Export the module with its parameters")
    name = names[path]
    if tensor.is_complex():
        real = names.tensors.get(path, tensor)
        return Pair(_constant(names, f"{path}.re", real.real), _constant(names, f"{path}.im", real.imag))
    if tensor.ndim == 0 and tensor.device.type != "meta" and name not in names.stored:
        return Scalar(tensor.item())
    names.tensors.setdefault(path, tensor)
    return Weight(name, Tensor(torch_dtype(tensor.dtype), tuple(int(n) for n in tensor.shape)))


def constants_of(model: Any, names: Names, graph: Graph) -> ArraySource:
    """The graph's weights that the checkpoint does not hold: buffers and constants, as arrays."""
    arrays: dict[str, Any] = {}
    parameters = {names[n] for n, _ in model.named_parameters(remove_duplicate=False)}
    for weight in graph.weights:
        if weight.name in names.stored or weight.name in parameters:
            continue
        tensor = names.tensors[weight.name]
        if tensor.device.type == "meta":
            raise ImportRefused(
                "it has no value: it is neither in the checkpoint nor computed",
                where=f"buffer {weight.name!r}",
                todo=BELONG,
            )
        arrays[weight.name] = to_numpy(tensor)
    return ArraySource(arrays)


def to_numpy(tensor: Any) -> Any:
    """A torch tensor as an array of the IR's element type, without a copy where the types agree."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    dtype = torch_dtype(tensor.dtype).numpy
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy().astype(dtype, copy=False)
