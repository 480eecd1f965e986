"""Converters of complex arithmetic, as rotary embeddings are often written: a pair of real operands.

A complex value is never an operand of the IR. What has no converter here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compiler.importers import aten_pointwise, aten_shape
from compiler.importers.context import Context

Convert = Callable[..., Any]


@dataclass(frozen=True)
class Pair:
    """re + i im; both of one shape."""

    re: Any
    im: Any

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.re, self.im


def is_complex(args: Any) -> bool:
    return any(isinstance(a, Pair) or (isinstance(a, list) and is_complex(a)) for a in args)


def _view_as_complex(c: Context, x: Any) -> Pair:
    """[.., 2] -> [..]."""
    last = c.type(x).rank - 1
    shape = c.type(x).shape[:-1]
    re, im = c.op("split", x, axis=last, sizes=(1, 1), several=True)
    return Pair(c.reshape(re, shape), c.reshape(im, shape))


def _view_as_real(c: Context, z: Pair) -> Any:
    """[..] -> [.., 2]."""
    parts = [c.reshape(p, (*c.type(p).shape, 1)) for p in z.parts]
    return c.op("concat", *parts, axis=len(c.out.shape) - 1)


def _polar(c: Context, size: Any, angle: Any) -> Pair:
    return Pair(c.op("mul", size, c.op("cos", angle)), c.op("mul", size, c.op("sin", angle)))


def _complex(c: Context, re: Any, im: Any) -> Pair:
    return Pair(re, im)


def _mul(c: Context, x: Any, y: Any) -> Pair:
    dtype = c.out.dtype
    if not isinstance(x, Pair) or not isinstance(y, Pair):
        pair, real = (x, y) if isinstance(x, Pair) else (y, x)
        factor = c.operand(real, dtype)
        return Pair(*(c.op("mul", part, factor) for part in pair.parts))
    (a, b), (u, v) = x.parts, y.parts
    re = c.op("sub", c.op("mul", a, u), c.op("mul", b, v))
    return Pair(re, c.op("add", c.op("mul", a, v), c.op("mul", b, u)))


def _conj(c: Context, z: Pair) -> Pair:
    return Pair(z.re, c.op("neg", z.im))


def _each(convert: Convert) -> Convert:
    """An op that moves elements, on both parts."""

    def both(c: Context, z: Any, *args: Any, **kwargs: Any) -> Pair:
        parts = ([getattr(e, p) for e in z] if isinstance(z, list) else getattr(z, p) for p in ("re", "im"))
        return Pair(*(convert(c, part, *args, **kwargs) for part in parts))

    return both


MOVES = (
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.unsqueeze.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", "aten.flatten.using_ints",
    "aten.transpose.int", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor",
    "aten.narrow.default", "aten.select.int", "aten.cat.default", "aten.index_select.default",
    "aten.index.Tensor",
)  # fmt: skip

FROM_REAL: dict[str, Convert] = {
    "aten.view_as_complex.default": _view_as_complex,
    "aten.polar.default": _polar,
    "aten.complex.default": _complex,
}

ON_COMPLEX: dict[str, Convert] = {
    **{name: _each(aten_shape.TABLE[name]) for name in MOVES},
    **{
        name: _each(aten_pointwise.TABLE[name])
        for name in (
            "aten.clone.default",
            "aten.alias.default",
            "aten.detach.default",
            "aten._to_copy.default",
        )
    },
    "aten.view_as_real.default": _view_as_real,
    "aten.real.default": lambda c, z: z.re,
    "aten.imag.default": lambda c, z: z.im,
    "aten.mul.Tensor": _mul,
    "aten._conj.default": _conj,
    "aten.resolve_conj.default": lambda c, z: z,
}
