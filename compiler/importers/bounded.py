"""What a model may make while its module is built: a configuration's numbers can ask for any amount.

Parameters have no values (they are on the meta device); buffers have, and some are quadratic in the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiler.importers.refused import ImportRefused

MAX_BYTES = 1 << 30  # over all arrays with values, those that are dropped again too
MAX_EMPTY = 1 << 22  # of one without
MAX_OPS = 12_000  # a layer of a dense model takes some 35
TODO = "Correct it in a copy of the checkpoint, or give a smaller number of positions there"
_COUNTED = ("arange", "linspace", "logspace", "eye")  # whose sizes are plain numbers


class Bounded(TorchDispatchMode):
    """Refuses ops before they make more. where: the configuration's file."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where, self._ops, self._bytes = where, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._ops += 1
        if self._ops > MAX_OPS:
            self._refuse("its model has too many parts")
        name, tensors = func.overloadpacket.__name__, list(_tensors((*args, *kwargs.values())))
        if _is_meta(tensors, kwargs):
            return func(*args, **kwargs)
        num_bytes = _most(name, args, tensors) * _width(tensors, kwargs)
        if name == "empty":  # a parameter, which is moved there next: its memory might not be had
            return func(*args, **(kwargs | {"device": "meta"} if num_bytes > MAX_EMPTY else kwargs))
        if not any(result.alias_info for result in func._schema.returns):  # a view, or in place
            self._bytes += num_bytes
        if self._bytes > MAX_BYTES:
            self._refuse(f"its model computes arrays of {self._bytes:,} bytes or more; at most {MAX_BYTES:,}")
        return func(*args, **kwargs)

    def _refuse(self, what: str) -> None:
        raise ImportRefused(what, where=self._where, todo=TODO)


def _is_meta(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    return str(kwargs.get("device")) == "meta" or any(t.device.type == "meta" for t in tensors)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _most(name: str, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> int:
    """Elements of an op's result, at most: of its sizes, and of its operands as they are broadcast."""
    sizes = [prod(a) for a in args if isinstance(a, list | tuple) and all(type(n) is int for n in a)]
    if name.startswith(_COUNTED):
        sizes += [int(abs(a)) for a in args if isinstance(a, int | float)]
    rank = max((t.ndim for t in tensors), default=0)
    shapes = [(1,) * (rank - t.ndim) + tuple(t.shape) for t in tensors]
    return max([prod(map(max, zip(*shapes, strict=True))) if shapes else 0, *sizes])


def _width(tensors: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> int:
    """Bytes of an element of the result, at most."""
    dtype = kwargs.get("dtype")
    return max([dtype.itemsize if dtype is not None else 4 if not tensors else 1]
               + [t.element_size() for t in tensors])  # fmt: skip
