"""Constants that a model's forward makes keep their values although the model is on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def constants_kept() -> Iterator[None]:
    """Inside, torch.tensor(numbers, device="meta") and x[[numbers]] are made of `full` ops, which say what
    the numbers are."""
    import torch
    from torch.fx.experimental.symbolic_shapes import uninteresting_files

    made, taken = torch.tensor, torch.Tensor.__getitem__
    uninteresting_files().add(__file__)  # so that torch blames a guard on the model's line, not on ours

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if args or device is None or torch.device(device).type != "meta" or not _is_numbers(data):
            return made(data, *args, **kwargs)
        return _filled(data, kwargs.get("dtype") or _dtype(data), device)

    def item(self: Any, index: Any) -> Any:
        return taken(self, _without_lists(index, self.device) if self.device.type == "meta" else index)

    torch.tensor, torch.Tensor.__getitem__ = tensor, item
    try:
        yield
    finally:
        torch.tensor, torch.Tensor.__getitem__ = made, taken
        uninteresting_files().discard(__file__)


def _without_lists(index: Any, device: Any) -> Any:
    """An index with a list of one number as a slice, and with longer lists as tensors."""
    given = index if isinstance(index, tuple) else (index,)
    lists = [i for i in given if isinstance(i, list) and _is_numbers(i)]
    if len(lists) == 1 and len(lists[0]) == 1 and not any(hasattr(i, "shape") for i in given):
        return tuple(_slice(i[0]) if i is lists[0] else i for i in given)
    return (
        tuple(_filled(i, _dtype(i), device) if any(i is each for each in lists) else i for i in given)
        if lists
        else index
    )


def _slice(at: int) -> slice:
    return slice(at, None if at == -1 else at + 1)


def _is_numbers(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return len(data) > 0 and all(map(_is_numbers, data))
    return isinstance(data, bool | int | float)


def _dtype(data: Any) -> Any:
    """The element type that torch.tensor gives numbers."""
    import torch

    kinds = {type(n) for n in _leaves(data)}
    if float in kinds:
        return torch.get_default_dtype()
    return torch.int64 if int in kinds else torch.bool


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, list | tuple):
        for each in data:
            yield from _leaves(each)
    else:
        yield data


def _filled(data: Any, dtype: Any, device: Any) -> Any:
    import torch

    if isinstance(data, list | tuple):
        return torch.stack([_filled(each, dtype, device) for each in data])
    return torch.full((), data, dtype=dtype, device=device)
