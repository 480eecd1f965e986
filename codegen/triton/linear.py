"""Linear: act(x @ w.T + bias) times the up half where gated, plus a residual, in one kernel.

A linear of several experts is the same for each pair of a token and an expert that it chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from codegen.triton.context import FLOATS, Context, dtype_of, operands, refuse, shape_of
from codegen.triton.launch import Arg, Case, Expr, Launch, cdiv, expression, times
from codegen.triton.pairs import Pairs
from codegen.triton.render import render
from codegen.triton.tiles import LinearTile, linear_tiles
from ir.dims import product
from ir.graph import Op, Value, Weight
from ir.types import DType
from passes.match import attribute


def linear(ctx: Context, op: Op) -> list[Case]:
    """A launch for each range of rows that has a tile of its own."""
    return Linear(ctx, op).cases()


@dataclass(frozen=True)
class Linear:
    ctx: Context
    op: Op

    @cached_property
    def given(self) -> dict[str, Value | Weight]:
        """Operands but for the experts."""
        return {name: arg for name, arg in operands(self.op).items() if name != "experts"}

    @cached_property
    def pairs(self) -> Pairs | None:
        return Pairs.of(self.ctx, self.op)

    @cached_property
    def rows(self) -> Expr:
        """Of y, which is [rows, n]."""
        return expression(product(shape_of(self.op.out)[:-1]))

    @cached_property
    def n(self) -> int:
        return self._width(self.op.out)

    @cached_property
    def k(self) -> int:
        """What is summed over."""
        return self._width(self.given["x"])

    def _width(self, arg: Value | Weight) -> int:
        found = expression(shape_of(arg)[-1])
        if not isinstance(found, int):
            raise refuse(self.op, f"rows of {found} elements; only their number may depend on a step")
        return found

    @cached_property
    def is_wide(self) -> bool:
        """Whether the factors are multiplied as f32, to which the narrower one is then widened.

        The interpreter multiplies f32 alone.
        """
        types = {dtype_of(self.given[name]) for name in ("x", "w")}
        return self.ctx.device.interpreted or len(types) > 1 or DType.F32 in types

    def cases(self) -> list[Case]:
        for arg in (*self.given.values(), self.op.out):
            if dtype_of(arg) not in FLOATS:
                raise refuse(self.op, f"an operand of type {dtype_of(arg)}; there is {', '.join(FLOATS)}")
        args, pairs = self._args({}), self.pairs
        tiles = linear_tiles(
            self.ctx.device, self.n, self.k, gated=attribute(self.op, "gated"), wide=self.is_wide,
            aligned=all(args[name].aligned for name in ("x", "w", "K", "x_ld", "w_ld")),
            invariant=self.ctx.invariant, experts=pairs and pairs.num_experts,
        )  # fmt: skip
        if pairs is not None:
            return pairs.cases(tiles, self._launch)
        rows = self.rows
        if isinstance(rows, int):
            tiles = [(None, next(tile for most, tile in tiles if most is None or rows <= most))]
        return [Case((self._launch(tile),), None if most is None else (rows, most)) for most, tile in tiles]

    def _launch(self, tile: LinearTile, pairs: Pairs | None = None) -> Launch:
        """The launch of a tile's kernel. N and K are numbers that it is given, so that layers share it."""
        gated, activation = attribute(self.op, "gated"), attribute(self.op, "activation")
        bias, residual = ("bias" in self.given, "residual" in self.given)
        ends = [activation] * (activation != "none") + ["gated"] * gated
        ends += ["bias"] * bias + ["residual"] * residual
        widen = {x: _widening(self.is_wide, dtype_of(self.given[x])) for x in ("x", "w")}
        body = render(
            "linear",
            gated=gated, activation=activation, bias=bias, residual=residual, pairs=pairs,
            precision=self.ctx.device.dot_f32 if self.is_wide else "ieee",
            widen_x=widen["x"], widen_w=widen["w"],
        )  # fmt: skip
        rows = {"rows": self.ctx.size(self.rows)} if pairs is None else pairs.args(tile)
        tiles_m = cdiv(self.rows, tile.m) if pairs is None else pairs.tiles_m(tile)
        return self.ctx.launch(
            "_".join([self.op.kind, *ends, *(["direct"] if pairs and pairs.direct else [])]),
            body,
            self._args(rows),
            (times(tiles_m, cdiv(self.n, tile.n)),),
            tile_constants(tile, self.n, self.k),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _args(self, rows: dict[str, Arg]) -> dict[str, Arg]:
        """rows: what says which rows of y there are."""
        ctx, given = self.ctx, self.given
        args = {name: ctx.pointer(arg) for name, arg in given.items()}
        args |= {"out": ctx.pointer(self.op.out), **rows, "N": ctx.size(self.n), "K": ctx.size(self.k)}
        args |= {"x_ld": ctx.size(row_stride(ctx, self.op, given["x"])), "w_ld": ctx.size(ctx.ld(given["w"]))}
        if "residual" in given:
            args["residual_ld"] = ctx.size(row_stride(ctx, self.op, given["residual"]))
        return args


def tile_constants(tile: LinearTile, n: int, k: int) -> dict[str, bool | int | float | str]:
    return {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP": tile.group,
        "PARTS": tile.parts,
        "CLAMPED": tile.clamped,
        "EVEN_N": n % tile.n == 0,
        "EVEN_K": k % tile.k == 0,
    }


def _widening(wide: bool, dtype: DType) -> str:
    return ".to(tl.float32)" if wide and dtype is not DType.F32 else ""


def row_stride(ctx: Context, op: Op, arg: Value | Weight) -> int:
    """Elements from one row, of the last axis, to the next."""
    *outer, width = shape_of(arg)
    if len(outer) == 0 or product(tuple(outer[1:])) == 1:
        return ctx.ld(arg)
    if not ctx.is_contiguous(arg):
        raise refuse(op, f"%{arg.name} is a view whose rows are not evenly spaced")
    return cast(int, expression(width))
