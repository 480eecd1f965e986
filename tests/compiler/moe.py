"""A mixture of experts as the importer gives it, to follow the layers of a made decoder."""

from __future__ import annotations

from dataclasses import dataclass

from ir.build import GraphBuilder
from ir.graph import Value, Weight
from ir.types import DType, Tensor
from tests.compiler.decoder import S


@dataclass(frozen=True)
class Moe:
    """Stacks of gate and up [E,2I,H] and of down [E,H,I], chosen by softmax, and a shared linear if asked."""

    width: int = 32
    inner: int = 24
    experts: int = 5
    chosen: int = 2
    shared: bool = False

    def __call__(self, b: GraphBuilder, x: Value, n: int) -> Value:
        path = f"model.layers.{n}.moe"
        rows = b.op("reshape", x, shape=(S, self.width), loc=path)
        router = _weight(f"{path}.gate.weight", self.experts, self.width)
        scores = b.op("softmax", b.op("linear", rows, router, loc=f"{path}.gate"), axis=1, loc=path)
        top, chosen = b.op("topk", scores, k=self.chosen, loc=path, several=True)
        args = {"num_experts": self.experts, "loc": f"{path}.experts"}
        both = b.op(
            "moe_linear", rows, self._stack(b, path, "up", 2 * self.inner, self.width), chosen, **args
        )
        gate, up = b.op("split", both, axis=2, sizes=(self.inner, self.inner), loc=path, several=True)
        inner = b.op("mul", b.op("silu", gate, loc=path), up, loc=path)
        down = b.op("moe_linear", inner, self._stack(b, path, "down", self.width, self.inner), chosen, **args)
        share = b.op("reshape", top, shape=(S, self.chosen, 1), loc=path)
        total = b.op("sum", b.op("mul", down, share, loc=path), axes=(1,), loc=path)
        if self.shared:
            weight = _weight(f"{path}.shared.weight", self.width, self.width)
            total = b.op("add", total, b.op("linear", rows, weight, loc=f"{path}.shared"), loc=path)
        return b.op("add", x, b.op("reshape", total, shape=(1, S, self.width), loc=path), loc=path)

    def _stack(self, b: GraphBuilder, path: str, name: str, rows: int, columns: int) -> Value:
        weight = _weight(f"{path}.experts.{name}", self.experts, rows, columns)
        return b.op("reshape", weight, shape=(self.experts * rows, columns), loc=f"{path}.experts")


def _weight(name: str, *shape: int) -> Weight:
    return Weight(name, Tensor(DType.F32, shape))
