"""A decoder in the imported form, as the importer of checkpoints gives it, of any sizes and windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Scalar, Value, Weight
from ir.types import DType, Tensor

S = symbol("S")
Extra = Callable[[GraphBuilder, Value, int], Value]


@dataclass(frozen=True)
class Decoder:
    """windows: of each layer, None: all earlier tokens. extra: ops after a layer, from its result."""

    windows: Sequence[int | None]
    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    vocab: int = 31
    context: int = 64
    softcap: float | None = None
    straight: bool = True  # rotate (x1, x2) to (-x2, x1), as rotary embeddings do
    extra: Extra | None = None

    @property
    def width(self) -> int:
        return self.heads * self.size

    @property
    def num_parameters(self) -> int:
        """Of a tied embedding, and for each layer a norm, q, k, v and an output."""
        layer = self.width + 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.size
        return self.vocab * self.width + len(self.windows) * layer

    def graph(self) -> Graph:
        inputs = tuple(Value(n, Tensor(DType.I32, (1, S))) for n in ("ids", "pos"))
        b = GraphBuilder("made", {"S": (1, self.context)}, inputs)
        table = _weight("model.embed.weight", self.vocab, self.width)
        x = b.op("embed", inputs[0], table, loc="model.embed")
        cos, sin = self._tables(b, inputs[1])
        for n, window in enumerate(self.windows):
            x = self._layer(b, x, cos, sin, n, window)
            x = self.extra(b, x, n) if self.extra is not None else x
        return b.graph((b.op("linear", x, table, loc="lm_head", name="logits"),))

    def _tables(self, b: GraphBuilder, pos: Value) -> tuple[Value, Value]:
        """cos and sin [1,1,S,D], of which the second half repeats the first."""
        loc = "model.rotary"
        angle = b.op("cast", b.op("reshape", pos, shape=(1, 1, S, 1), loc=loc), dtype="f32", loc=loc)
        half = b.op("mul", angle, _weight("model.rotary.inv_freq", self.size // 2), loc=loc)
        both = b.op("concat", half, half, axis=3, loc=loc)
        return b.op("cos", both, loc=loc), b.op("sin", both, loc=loc)

    def _layer(self, b: GraphBuilder, x: Value, cos: Value, sin: Value, n: int, window: int | None) -> Value:
        path = f"model.layers.{n}"
        norm = b.op("rms_norm", x, _weight(f"{path}.norm.weight", self.width), eps=1e-5, loc=f"{path}.norm")
        q, k, v = (self._heads(b, norm, path, name, g) for name, g in self._projections())
        q, k = (self._rotated(b, each, cos, sin, path) for each in (q, k))
        args = {"scale": self.size**-0.5, "softcap": self.softcap, "loc": f"{path}.attn"}
        out = b.op("attention", q, k, v, self._mask(b, window), name=f"l{n}.attn", **args)
        flat = b.op("reshape", out, shape=(1, S, self.width), loc=f"{path}.attn")
        weight = _weight(f"{path}.attn.o.weight", self.width, self.width)
        return b.op("add", x, b.op("linear", flat, weight, loc=f"{path}.attn.o"), loc=path)

    def _projections(self) -> list[tuple[str, int]]:
        return [("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)]

    def _heads(self, b: GraphBuilder, x: Value, path: str, name: str, heads: int) -> Value:
        weight = _weight(f"{path}.attn.{name}.weight", heads * self.size, self.width)
        y = b.op("linear", x, weight, loc=f"{path}.attn.{name}")
        y = b.op("reshape", y, shape=(1, S, heads, self.size), loc=f"{path}.attn")
        return b.op("transpose", y, perm=(0, 2, 1, 3), loc=f"{path}.attn")

    def _rotated(self, b: GraphBuilder, x: Value, cos: Value, sin: Value, path: str) -> Value:
        loc, half = f"{path}.attn", self.size // 2
        first = b.op("slice", x, axis=3, start=0, stop=half, loc=loc)
        second = b.op("slice", x, axis=3, start=half, stop=self.size, loc=loc)
        turned = (
            (b.op("neg", second, loc=loc), first) if self.straight else (b.op("neg", first, loc=loc), second)
        )
        other = b.op("concat", *turned, axis=3, loc=loc)
        return b.op("add", b.op("mul", x, cos, loc=loc), b.op("mul", other, sin, loc=loc), loc=loc)

    def _mask(self, b: GraphBuilder, window: int | None) -> Value:
        """bool [1,1,S,S] from comparisons of positions."""
        q, k = (
            b.op("reshape", b.op("iota", size=S, dtype="i32", loc="model"), shape=shape, loc="model")
            for shape in ((1, 1, S, 1), (1, 1, 1, S))
        )
        causal = b.op("le", k, q, loc="model")
        if window is None:
            return causal
        near = b.op("lt", b.op("sub", q, k, loc="model"), Scalar(window), loc="model")
        return b.op("and", causal, near, loc="model")


def _weight(name: str, *shape: int) -> Weight:
    return Weight(name, Tensor(DType.F32, shape))


def summing(kind: str, **attrs: Any) -> Extra:
    """Adds what an op over all tokens gives, in layer 1."""

    def extra(b: GraphBuilder, x: Value, n: int) -> Value:
        loc = f"model.layers.{n}.mix"
        return b.op("add", x, b.op(kind, x, loc=loc, name="mixed", **attrs), loc=loc) if n == 1 else x

    return extra
