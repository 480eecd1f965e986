"""A GGUF file -> the IR.

The `gguf` package reads and dequantises; configuration, names and the layout of each tensor (llama-like
files carry query and key rows in another order) are transformers' own. Tensors are dequantised when they
are asked for, some rows at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from compiler.importers.arrangement import Arrangement, Concat, Misfit, Rows, Stored, whole
from compiler.importers.choose import instantiate
from compiler.importers.export import quiet
from compiler.importers.gguf_header import check_header
from compiler.importers.huggingface import import_model
from compiler.importers.model import Imported
from compiler.importers.quantized.gguf import FORMATS, GgufMatrix
from compiler.importers.quantized.joined import joined
from compiler.importers.quantized.matrix import Matrix
from compiler.importers.refused import OTHER_FILE, ImportRefused, one_line
from compiler.importers.tokenizer import convert_tokenizer
from compiler.weights import BELONG, Array, WeightError
from ir.types import DType, Tensor
from runtime.errors import shown

_PLAIN = {"F32": DType.F32, "F16": DType.F16, "BF16": DType.BF16, "F64": DType.F64}

ROPE_DIVISORS = "rope_freqs.weight"

_MEANT = {
    "attention.sliding_window": "sliding_window",
    "attention.key_length": "head_dim",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # from a key of the file to the attribute of the configuration that has its meaning


def load_gguf(path: Path, max_context: int | None = None, *, keep_grid: bool = False) -> Imported:
    """Import a GGUF file. keep_grid: leave quantised matrices as they are.

    Raises ImportRefused or WeightError.
    """
    reader = _open(path)
    with _parsed_once(reader):
        config = _config(path)
        _refuse_other_values(path, reader, config)
        has_tokenizer = reader.get_field("tokenizer.ggml.model") is not None
        tokenizer_files = convert_tokenizer(path.parent, gguf_file=path.name) if has_tokenizer else {}
        _refuse_unread(path, reader, config)
        weights = GgufSource(path, reader, config)
    return import_model(
        config,
        weights,
        name=path.stem,
        max_context=max_context,
        source=("gguf", str(path), (path.name,)),
        eos=tuple(v for v in [_number(reader, "tokenizer.ggml.eos_token_id")] if v is not None),
        bos=_number(reader, "tokenizer.ggml.bos_token_id"),
        frequency_divisors=_frequency_divisors(reader),
        tokenizer_files=tokenizer_files,
        keep_grid=keep_grid,
    )


class GgufSource:
    """The tensors of a GGUF file under transformers' names, in transformers' layout.

    Quantised tensors are given as f32, or as what `matrix` finds.
    """

    def __init__(self, path: Path, reader: Any, config: Any) -> None:
        self.path = path
        self._layout = _Layout(config, _text(reader, "general.architecture"))
        self._tensors, self._part_names = _by_name(path, reader, config, self._layout)
        self._parts = {name for names in self._part_names.values() for name in names}
        self._joined: dict[str, Arrangement] = {}
        self._joined.update({own: self._join(own, names) for own, names in self._part_names.items()})

    @property
    def names(self) -> tuple[str, ...]:
        return (*(n for n in self._tensors if n not in self._parts), *self._joined)

    def _join(self, own: str, parts: tuple[str, ...]) -> Arrangement:
        """Experts' matrices of several tensors [E,N,K], one below the other."""
        try:
            return Concat(tuple(Stored(self, name) for name in parts), 1)
        except Misfit as error:
            what = f"{own!r} is put together from {' and '.join(parts)}, which do not fit: {error.what}"
            raise WeightError(what, where=str(self.path), todo=BELONG) from None

    def matrix(self, name: str) -> Matrix | None:
        """Of a format with a grid of its own, its rows as they are or in another order."""
        if name in self._joined:
            return joined(self._rows_of(name), self.matrix)
        tensor = self._find(name)
        form = FORMATS.get(tensor.tensor_type.name)
        if form is None or len(tensor.shape) not in (2, 3):
            return None
        order = self._layout.row_order(tensor.name, int(tensor.shape[-1]))
        if order is None:
            return None
        count = int(tensor.shape[1]) if len(tensor.shape) == 3 else 1
        order = (order[:, None] * count + np.arange(count)).ravel()
        return GgufMatrix(form, tensor.data.reshape(len(order), -1), order)

    def _rows_of(self, name: str) -> list[Rows]:
        """Of joined tensors [E,N,K] all rows, expert by expert."""
        sizes = {part: int(self._find(part).shape[1]) for part in self._part_names[name]}
        count = self._joined[name].shape[0]
        return [Rows(part, e * n, (e + 1) * n) for e in range(count) for part, n in sizes.items()]

    def type(self, name: str) -> Tensor:
        if name in self._joined:
            return Tensor(self._joined[name].dtype, self._joined[name].shape)
        tensor = self._find(name)
        shape = tuple(int(n) for n in reversed(tensor.shape))
        moved = self._layout.shape(tensor.name, shape)
        return Tensor(_PLAIN.get(tensor.tensor_type.name, DType.F32), moved)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        if name in self._joined:
            return self._joined[name].read(((lo, hi), *whole(self._joined[name])[1:]))
        tensor = self._find(name)
        order = self._layout.row_order(tensor.name, int(tensor.shape[-1]) if len(tensor.shape) > 1 else None)
        if order is None:
            return self.read(name)[lo:hi]
        if (np.diff(order[lo:hi]) == 1).all():  # contiguous rows: a view where they are not quantised
            return (
                self._stored(tensor, slice(int(order[lo]), int(order[lo]) + hi - lo))
                if hi > lo
                else self.read(name)[:0]
            )
        return self._stored(tensor, order[lo:hi])

    def read(self, name: str) -> Array:
        if name in self._joined:
            return self._joined[name].read(whole(self._joined[name]))
        tensor = self._find(name)
        return self._layout.apply(tensor.name, self._stored(tensor, slice(None)))

    def _find(self, name: str) -> Any:
        if name not in self._tensors:
            raise WeightError(f"there is no tensor for {name!r}", where=str(self.path), todo=BELONG)
        return self._tensors[name]

    def _stored(self, tensor: Any, rows: Any) -> Array:
        return stored_rows(self.path, tensor, rows)


def stored_rows(path: Path, tensor: Any, rows: Any) -> Array:
    """Rows as the file has them, dequantised."""
    from gguf import dequantize

    data = tensor.data[rows]
    if tensor.tensor_type.name in _PLAIN:
        return data.view(_PLAIN[tensor.tensor_type.name].numpy)
    try:
        with np.errstate(all="ignore"):  # a scale may be infinite: --check and the trial find it
            return dequantize(data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise WeightError(
            f"type {tensor.tensor_type.name}, which the gguf package does not dequantise ({error})",
            where=f"{path}, tensor {shown(tensor.name)}",
            todo="Requantise the model to Q8_0 or F16",
        ) from error


class _Layout:
    """Where transformers' layout of an array differs from the file's: its own tensor processor, asked."""

    def __init__(self, config: Any, architecture: str) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())

    def apply(self, name: str, array: Array) -> Array:
        result = self.processor.process(array, name, tensor_key_mapping={}, parsed_parameters={"tensors": {}})
        if result.name != name:
            what = "it is stored in a layout that is taken apart by name"
            raise ImportRefused(what, where=f"tensor {name!r}", todo=OTHER_FILE)
        return np.asarray(result.weights, dtype=array.dtype)

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.apply(name, np.broadcast_to(np.float32(0), shape)).shape

    def place(self, name: str, names: Mapping[str, str]) -> tuple[str, int, int] | None:
        """The model's array that a tensor [E,N,K] is all or a part of, which of its parts, and of how many.

        None where the processor leaves the tensor as it is, or takes it apart otherwise.
        """
        made: dict[str, Any] = {}
        parsed = {"tensors": made}
        with suppress(KeyError):
            self.processor.process(
                np.ones((1, 1, 1), np.float32), name, tensor_key_mapping=names, parsed_parameters=parsed
            )
        shapes = {own: tuple(array.shape) for own, array in made.items()}
        if len(shapes) != 1 or (shape := next(iter(shapes.values())))[::2] != (1, 1):
            return None
        own, array = next(iter(made.items()))
        return own, int(np.asarray(array).argmax()), shape[1]

    def row_order(self, name: str, num_rows: int | None) -> Array | None:
        """Which stored row each row is, found by moving row numbers; None where more than rows is changed."""
        if num_rows is None:
            return None
        numbers = np.arange(num_rows, dtype=np.float64)[:, None]
        moved = self.apply(name, numbers)
        if moved.shape != numbers.shape or not np.array_equal(np.sort(moved, axis=0), numbers):
            return None
        return moved[:, 0].astype(np.int64)


def _open(path: Path) -> Any:
    check_header(path)
    from gguf import GGUFReader

    try:
        return GGUFReader(str(path))
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        what = f"not a GGUF file, or truncated: {one_line(error)}"
        raise WeightError(what, where=str(path), todo="Download the file again") from error


@contextmanager
def _parsed_once(reader: Any) -> Iterator[None]:
    """Inside, transformers uses the reader that is open and one table of names: each takes seconds."""
    import gguf

    package: Any = gguf
    original = package.GGUFReader, package.get_tensor_name_map
    package.GGUFReader, package.get_tensor_name_map = lambda path: reader, functools.cache(original[1])
    try:
        yield
    finally:
        package.GGUFReader, package.get_tensor_name_map = original


def _config(path: Path) -> Any:
    from transformers import AutoConfig

    with quiet():
        try:
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        except Exception as error:  # whatever a wrong field makes of the many configuration classes
            what = f"transformers cannot read the model's configuration: {one_line(error)}"
            raise ImportRefused(what, where=str(path), todo=OTHER_FILE) from error


def _by_name(
    path: Path, reader: Any, config: Any, layout: _Layout
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """The file's tensors under the model's names, or under their own where several make one of the model's
    arrays, and the names of these, in order. Raises ImportRefused on a tensor without a place there.
    """
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    model = instantiate(config, str(path))
    _refuse_other_rotary_size(path, reader, model)
    names = get_gguf_hf_weights_map(model, layout.processor)
    found: dict[str, Any] = {}
    parts: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for tensor in reader.tensors:
        place = (names[tensor.name], 0, 1) if tensor.name in names else layout.place(tensor.name, names)
        if tensor.name == ROPE_DIVISORS:
            continue
        if place is None:
            what = f"the model has no place for tensor {tensor.name!r}, so it would not be computed as the "
            raise ImportRefused(f"{what}file means it", where=str(path), todo=OTHER_FILE)
        own, index, count = place
        found[own if count == 1 else tensor.name] = tensor
        if count > 1:
            counts[own] = count
            parts.setdefault(own, {})[index] = tensor.name
    for own, each in parts.items():
        if len(each) != counts[own]:
            what = f"only {', '.join(each.values())} of the {counts[own]} tensors that make {own!r} are there"
            raise WeightError(what, where=str(path), todo=BELONG)
    return found, {own: tuple(each[i] for i in sorted(each)) for own, each in parts.items()}


def _frequency_divisors(reader: Any) -> Array | None:
    """By how much each rotary frequency is divided, which transformers does not read."""
    tensor = next((t for t in reader.tensors if t.name == ROPE_DIVISORS), None)
    return None if tensor is None else np.array(tensor.data, np.float32)


def _refuse_other_values(path: Path, reader: Any, config: Any) -> None:
    """What transformers does not read of a file must be what it assumes instead."""
    architecture, length = (
        _text(reader, "general.architecture"),
        getattr(config, "max_position_embeddings", 0),
    )
    for key, attribute in _MEANT.items():
        field = reader.get_field(f"{architecture}.{key}")
        if field is None or isinstance(meant := field.contents(), list | str):
            continue
        used = getattr(config, attribute, None)
        if key == "attention.sliding_window" and not used and (not meant or meant >= (length or 0)):
            continue
        if used is None and attribute == "head_dim":
            used = config.hidden_size // config.num_attention_heads
        if used is None or not np.isclose(float(used), float(meant), rtol=1e-5):
            raise ImportRefused(
                f"{architecture}.{key} is {meant}, which transformers does not read (it takes "
                f"{attribute}={used})",
                where=str(path),
                todo=OTHER_FILE,
            )


def _refuse_other_rotary_size(path: Path, reader: Any, model: Any) -> None:
    """As many elements must be rotated as the file says."""
    key = f"{_text(reader, 'general.architecture')}.rope.dimension_count"
    count = _number(reader, key)
    sizes = {2 * int(b.shape[0]) for name, b in model.named_buffers() if name.endswith("inv_freq")}
    if count is not None and sizes and count not in sizes:
        what = f"{key} is {count}, but transformers rotates {min(sizes)} elements of this model"
        raise ImportRefused(what, where=str(path), todo=OTHER_FILE)


def _refuse_unread(path: Path, reader: Any, config: Any) -> None:
    """Scaled rotary embeddings are not among what transformers reads from a GGUF file."""
    key = f"{_text(reader, 'general.architecture')}.rope.scaling.type"
    scaling = _text(reader, key)
    read = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaling not in ("", "none") and read == "default":
        what = f"{key} is {scaling!r}, which transformers does not read"
        raise ImportRefused(what, where=str(path), todo=OTHER_FILE)


def _text(reader: Any, key: str) -> str:
    return str(_contents(reader, key) or "")


def _number(reader: Any, key: str) -> int | None:
    found = _contents(reader, key)
    if found is None or (isinstance(found, int | float) and math.isfinite(found)):
        return None if found is None else int(found)
    raise ImportRefused(
        f"{key} is {shown(found)}, not a number", where=str(reader.data.filename), todo=OTHER_FILE
    )


def _contents(reader: Any, key: str) -> Any:
    """A field's value, None without one. Raises ImportRefused on a text that is not UTF-8."""
    field = reader.get_field(key)
    try:
        return None if field is None else field.contents()
    except UnicodeDecodeError as error:
        raise ImportRefused(
            f"{shown(key)}: {error}", where=str(reader.data.filename), todo=OTHER_FILE
        ) from error
