"""Pairs of a token and an expert that it chose: the rows of a linear of several experts, expert by expert.

Few pairs are tiles of one row each and need no order: most have an expert of their own, whose matrix is read
for them alone. Otherwise a kernel before the linear's writes two lists into scratch space. `order` holds all
pairs, those of the same expert side by side. `tiles` says of each tile of BLOCK_M rows its expert, its first
place in the order, and how many rows it has. Expert e's tiles start at number first // BLOCK_M + e, where
`first` is its first place: no two experts' tiles overlap then, and no program has to know how many tiles
others have. Numbers end at pairs // BLOCK_M + experts, so that the grid follows from the number of tokens; a
number that is no tile's has the expert -1, and its programs return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import sympy

from codegen.triton.context import Context, dtype_of, operands, refuse, shape_of
from codegen.triton.launch import Arg, Case, Expr, Launch, cdiv, expression
from codegen.triton.render import render
from codegen.triton.schedule import power_of_two
from codegen.triton.tiles import LinearTile
from ir.dims import Dim, normalize, product
from ir.graph import Op, Value
from ir.types import DType
from passes.match import attribute


@dataclass(frozen=True)
class Pairs:
    """The pairs of an op's tokens and experts, as kernels and their templates see them.

    scratch_at: bytes into the op's scratch space, where the lists lie. direct: tiles are single pairs.
    """

    ctx: Context
    op: Op
    experts: Value
    scratch_at: Dim = 0
    direct: bool = False

    @staticmethod
    def of(ctx: Context, op: Op, scratch_at: Dim = 0) -> Pairs | None:
        """None of a linear whose rows all have one matrix."""
        experts = operands(op).get("experts")
        if experts is None:
            return None
        if dtype_of(experts) not in (DType.I32, DType.I64):
            raise refuse(op, f"experts of type {dtype_of(experts)}; there is i32, i64")
        if not isinstance(shape_of(experts)[-1], int):
            raise refuse(op, f"{shape_of(experts)[-1]} experts of a token; their number may not be a step's")
        return Pairs(ctx, op, cast(Value, experts), scratch_at)

    @property
    def num_experts(self) -> int:
        return attribute(self.op, "num_experts")

    @cached_property
    def slots(self) -> int:
        """Experts of a token."""
        return cast(int, shape_of(self.experts)[-1])

    @cached_property
    def shared(self) -> bool:
        """Whether a token's experts read one row of x."""
        return len(shape_of(self.op.args[0])) == len(shape_of(self.experts))

    @cached_property
    def count(self) -> Expr:
        return expression(product(shape_of(self.experts)))

    def expert(self, at: str, mask: str = "") -> str:
        """Spells the expert of pair number `at`: of one that is not there, the nearest that is."""
        place = at
        if not self.ctx.is_contiguous(self.experts):
            place = f"{at} // {self.slots} * {self.ctx.ld(self.experts)} + {at} % {self.slots}"
        found = f"tl.load(experts + {place}{f', mask={mask}, other=0' if mask else ''})"
        return f"tl.minimum(tl.maximum({found}, 0), {self.num_experts - 1})"

    # --- what a linear's kernel is given

    def tiles_m(self, tile: LinearTile) -> Expr:
        """Tiles of rows, or numbers of them."""
        if self.direct:
            return self.count
        if isinstance(self.count, int):
            return self.count // tile.m + self.num_experts
        return ("+", self.count if tile.m == 1 else ("//", self.count, tile.m), self.num_experts)

    def args(self, tile: LinearTile) -> dict[str, Arg]:
        found = {"experts": self.ctx.pointer(self.experts)} if self.direct else self._lists
        return found | {"tiles_m": self.ctx.size(self.tiles_m(tile))}

    @cached_property
    def _lists(self) -> dict[str, Arg]:
        """Where the lists lie (passes.memory.sizes)."""
        tiles = normalize(sympy.Integer(4) * product(shape_of(self.experts)) + self.scratch_at)
        scratch = self.ctx.scratch
        return {
            "order": scratch(self.op, "*i32", self.scratch_at),
            "tiles": scratch(self.op, "*i32", tiles),
        }

    # --- launches

    def cases(
        self,
        tiles: Sequence[tuple[int | None, LinearTile]],
        launch: Callable[[LinearTile, Pairs], Launch],
        before: tuple[Launch, ...] = (),
    ) -> list[Case]:
        """Of a linear by its launch of a tile. tiles: (most rows of an expert on average, tile). before: what
        is launched first.
        """
        few, count = max(self.slots, self.num_experts // 4), self.count
        direct: tuple[int | None, Pairs, LinearTile] = (few, replace(self, direct=True), tiles[0][1])
        ranges = [
            direct,
            *((None if most is None else most * self.num_experts, self, tile) for most, tile in tiles),
        ]
        if isinstance(count, int):
            fitting = next(r for r in ranges if r[0] is None or count <= r[0])
            ranges = [(None, *fitting[1:])]
        return [
            Case(
                (*before, *pairs._before(tile), launch(tile, pairs)), None if most is None else (count, most)
            )
            for most, pairs, tile in ranges
        ]

    def _before(self, tile: LinearTile) -> tuple[Launch, ...]:
        """The launch that writes the lists."""
        if self.direct:
            return ()
        interpreted = self.ctx.device.interpreted
        each = power_of_two(self.num_experts) if interpreted else 1
        sizes = {"count": self.ctx.size(self.count), "height": self.ctx.size(tile.m)}
        launch = self.ctx.launch(
            "pair_lists",
            render("pair_lists", pairs=self),
            {"experts": self.ctx.pointer(self.experts), **self._lists, **sizes},
            (cdiv(self.num_experts, each),),
            {"EXPERTS": each, "BLOCK": 256 if interpreted else 2048},
            num_warps=1 if interpreted else 8,
        )
        return (launch,)
