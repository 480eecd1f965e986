"""What Triton's interpreter works out anew at every operation, worked out once: types, shapes, broadcasts.

It takes less than half of the time so. No result changes: what it checks for overflow, it only looks at in a
debug mode that it has no switch for.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any


@lru_cache(maxsize=1)
def quicken(interpreter: Any) -> None:
    """Put quicker functions in the place of the interpreter's module's."""
    language, builder = interpreter.tl, interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _array_types(language, interpreter._get_np_dtype)
    language.dtype.__eq__ = _equal(language.dtype.__eq__)
    _keep_shapes(language.core)
    interpreter._patch_builtin = _builtins(language.core.is_builtin, interpreter._patch_attr)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)


def _array_types(language: Any, find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's type of a type, which the interpreter finds in a dictionary that it makes each time."""
    block, found = language.block_type, dict[str, Any]()

    def array_type(of: Any) -> Any:
        element = of.element_ty if isinstance(of, block) else of
        if element.name not in found:
            found[element.name] = find(element)
        return found[element.name]

    return array_type


def _builtins(is_builtin: Callable[[Any], bool], put: Callable[..., None]) -> Callable[..., None]:
    """Which members of a module or class are its operations, looked for once: dir() of them takes long."""
    found = dict[Any, list[tuple[str, Any]]]()

    def put_all(of: Any, builder: Any, scope: Any) -> None:
        if of not in found:
            found[of] = [(name, member) for name, member in inspect.getmembers(of) if is_builtin(member)]
        for name, member in found[of]:
            put(of, name, member, builder, scope)

    return put_all


def _equal(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or equal(self, other)


def _keep_shapes(core: Any) -> None:
    """Types of one shape, and values of them, share it and its size."""

    @lru_cache(maxsize=None, typed=True)  # typed: 16.0 is no size, though it equals 16
    def of_type(*shape: int) -> tuple[Any, int]:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(shape), core.validate_block_shape(shape)

    @cache
    def of_value(*shape: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = of_type(*(getattr(size, "value", size) for size in shape))

    def make_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_value(*(type.shape if type.is_block() else ()))

    core.block_type.__init__, core.tensor.__init__ = make_type, make_value
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    def quick(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # as _keep_shapes keeps them
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return quick
