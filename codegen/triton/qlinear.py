"""Linear with quantised weights: as linear, of (codes - zero) * scale + offset for each group along K.

In one of two forms. floats: a tile's codes become factors of x's type, and where all of K is one group the
scale multiplies the sums instead. codes: x is quantised to i8 or e4m3 by a kernel before, and codes are
multiplied with codes, group by group, then scaled: integers exactly, in i32; e4m3 with sums of f32, natively
from sm_90 on, and on sm_80 and gfx942 as the same numbers in f16. Where quantised x meets other groups or
codes (groups of less than 32, u4 by e4m3) both become floats of f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import sympy

from codegen.triton import quantize
from codegen.triton.context import FLOATS, TYPES, Context, dtype_of, literal, operands, refuse, shape_of
from codegen.triton.launch import Arg, Case, Launch, cdiv, expression, times
from codegen.triton.linear import row_stride, tile_constants
from codegen.triton.pairs import Pairs
from codegen.triton.qlinear_tiles import CODES, NARROW, WIDE, qlinear_tiles
from codegen.triton.render import render
from codegen.triton.rows import Rows
from codegen.triton.schedule import power_of_two
from codegen.triton.tiles import LinearTile
from codegen.triton.weights import per_byte, row_bytes
from ir.dims import Dim, normalize, product
from ir.graph import Op, Value, Weight
from ir.types import DType
from passes.match import attribute

LEAST_K = 32  # of a product of 8-bit codes
UNBOUNDED = 1 << 30
NATIVE_E4M3 = ("sm_90", "sm_100")
OPTIONAL = ("zero", "offset", "bias", "residual")


def qlinear(ctx: Context, op: Op) -> list[Case]:
    """A launch for each range of rows that has a tile of its own, behind the one that quantises x."""
    return QLinear(ctx, op).cases()


@dataclass(frozen=True)
class QLinear:
    ctx: Context
    op: Op

    # --- what the op says

    @cached_property
    def x(self) -> Value:
        return cast(Value, self.op.args[0])

    @cached_property
    def q(self) -> Value | Weight:
        return cast("Value | Weight", self.op.args[1])

    @cached_property
    def given(self) -> dict[str, Value | Weight]:
        """Optional operands that there are."""
        return {name: arg for name, arg in operands(self.op).items() if name in OPTIONAL}

    @cached_property
    def n(self) -> int:
        return self._size(shape_of(self.op.out)[-1])

    @cached_property
    def k(self) -> int:
        return self._size(shape_of(self.x)[-1])

    def _size(self, dim: Dim) -> int:
        if not isinstance(dim, int):
            raise refuse(self.op, f"rows of {dim} elements; only their number may depend on a step")
        return dim

    @cached_property
    def num_rows(self) -> Dim:
        return product(shape_of(self.op.out)[:-1])

    @cached_property
    def pairs(self) -> Pairs | None:
        """Of a linear of several experts; their lists lie behind x's codes and scales."""
        return Pairs.of(self.ctx, self.op, self._codes_bytes(self.x_ld + 4 * self.x_groups))

    def _codes_bytes(self, each: int) -> Dim:
        """Of so many for each row of x, where it is quantised."""
        rows = 0 if self.x_dtype is None else product(shape_of(self.x)[:-1])
        return normalize(sympy.Integer(each) * rows)

    @cached_property
    def x_dtype(self) -> DType | None:
        found = attribute(self.op, "x_dtype")
        return None if found is None else DType(found)

    @cached_property
    def group_size(self) -> int:
        """0: all of K is one group."""
        found = attribute(self.op, "group_size")
        return 0 if found >= self.k else found

    @cached_property
    def x_group_size(self) -> int:
        found = attribute(self.op, "x_group_size")
        return 0 if found >= self.k else found

    @cached_property
    def x_groups(self) -> int:
        return -(-self.k // self.x_group_size) if self.x_group_size else 1

    # --- which form

    @cached_property
    def most_k(self) -> int:
        """Elements of K that share scales: the largest power of two that divides both groups."""
        sizes = [size for size in (self.group_size, self.x_group_size) if size]
        return min((size & -size for size in sizes), default=UNBOUNDED)

    @cached_property
    def of_codes(self) -> bool:
        both = (self.x_dtype is DType.F8E4M3, dtype_of(self.q) is DType.F8E4M3)
        unfit = both[0] != both[1] or (both[0] and "offset" in self.given)
        return self.x_dtype is not None and not unfit and self.most_k >= LEAST_K

    @cached_property
    def type(self) -> DType:
        """Of factors, in the form of floats."""
        wide = self.ctx.device.interpreted or self.x_dtype is not None
        return DType.F32 if wide else dtype_of(self.x)

    @cached_property
    def kind(self) -> str:
        if self.of_codes:
            return CODES
        return WIDE if self.type is DType.F32 else NARROW

    def relation(self, tile: LinearTile) -> str:
        """How groups lie to what a tile takes of K."""
        if self.group_size == 0:
            return "whole"
        if self.group_size % tile.k == 0:
            return "across"
        within = tile.k % self.group_size == 0 and power_of_two(self.group_size) == self.group_size
        return "within" if within else "other"

    # --- launches

    def cases(self) -> list[Case]:
        self._check()
        tiles = qlinear_tiles(
            self.ctx.device, self.kind, self.n, self.k, self.most_k if self.of_codes else UNBOUNDED,
            gated=attribute(self.op, "gated"), invariant=self.ctx.invariant,
            experts=self.pairs and self.pairs.num_experts,
        )  # fmt: skip
        before = () if self.x_dtype is None else (self._quantize(),)
        if self.pairs is not None:
            return self.pairs.cases(tiles, self.launch, before)
        rows = expression(self.num_rows)
        if isinstance(rows, int):
            tiles = [(None, next(tile for most, tile in tiles if most is None or rows <= most))]
        return [
            Case((*before, self.launch(tile)), None if most is None else (rows, most)) for most, tile in tiles
        ]

    def _check(self) -> None:
        for arg in (self.x, self.op.out):
            if dtype_of(arg) not in FLOATS:
                raise refuse(self.op, f"an operand of type {dtype_of(arg)}; there is {', '.join(FLOATS)}")
        if dtype_of(self.q) is DType.U2:
            raise refuse(self.op, "weights of type u2; there is u4, i8, u8, f8e4m3")
        given = operands(self.op)
        if not all(self.ctx.is_constant(given[n]) for n in ("q", "scale", "zero", "offset") if n in given):
            raise refuse(self.op, "weights that are not constant")

    @cached_property
    def _scratch(self) -> dict[str, Arg]:
        """Where x's codes and scales lie (passes.memory.sizes)."""
        dtype = "*i8" if self.x_dtype is DType.I8 else "*u8"
        scratch, scales = self.ctx.scratch, self._codes_bytes(self.x_ld)
        return {"x": scratch(self.op, dtype), "x_scale": scratch(self.op, "*fp32", scales)}

    @cached_property
    def x_ld(self) -> int:
        if self.x_dtype is None:
            return row_stride(self.ctx, self.op, self.x)
        return row_bytes(DType.I8, self.k)

    def _quantize(self) -> Launch:
        assert self.x_dtype is not None
        to = {"q": self._scratch["x"], "scales": self._scratch["x_scale"]}
        rows = Rows.of(self.ctx, self.op, self.x)
        return quantize.quantize_launch(
            self.ctx, self.x, rows, self.x_dtype, self.x_group_size, to, self.x_ld
        )

    def launch(self, tile: LinearTile, pairs: Pairs | None = None) -> Launch:
        ends = [attribute(self.op, "activation")] * (attribute(self.op, "activation") != "none")
        ends += ["gated"] * attribute(self.op, "gated")
        ends += [name for name in ("bias", "residual") if name in self.given]
        rows = {"rows": self.ctx.size(self.num_rows)} if pairs is None else pairs.args(tile)
        tiles_m = cdiv(expression(self.num_rows), tile.m) if pairs is None else pairs.tiles_m(tile)
        return self.ctx.launch(
            "_".join([self.op.kind, *ends, *(["direct"] if pairs and pairs.direct else [])]),
            render("qlinear", pairs=pairs, **self._hooks(tile)),
            self._args(rows),
            (times(tiles_m, cdiv(self.n, tile.n)),),
            tile_constants(tile, self.n, self.k),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _args(self, rows: dict[str, Arg]) -> dict[str, Arg]:
        """rows: what says which rows of y there are."""
        ctx = self.ctx
        args = {"x": ctx.pointer(self.x)} if self.x_dtype is None else dict(self._scratch)
        args |= {"w": ctx.codes(self.q), "scale": ctx.pointer(cast("Value | Weight", self.op.args[2]))}
        args |= {name: ctx.pointer(arg) for name, arg in self.given.items()}
        args |= {"out": ctx.pointer(self.op.out), **rows, "N": ctx.size(self.n)}
        args |= {"K": ctx.size(self.k), "x_ld": ctx.size(self.x_ld)}
        args["w_ld"] = ctx.size(row_bytes(dtype_of(self.q), self.k))
        if "residual" in self.given:
            args["residual_ld"] = ctx.size(row_stride(ctx, self.op, self.given["residual"]))
        return args

    # --- what the template is filled in with

    def _hooks(self, tile: LinearTile) -> dict[str, Any]:
        zeros, offsets = "zero" in self.given, "offset" in self.given
        quantised, whole = self.x_dtype is not None, self.group_size == 0 and not zeros and not offsets
        hooks = {
            "gated": attribute(self.op, "gated"), "activation": attribute(self.op, "activation"),
            "bias": "bias" in self.given, "residual": "residual" in self.given,
            "zeros": zeros, "offsets": offsets,
            "per": per_byte(dtype_of(self.q)), "group_size": self.group_size,
            "groups": -(-self.k // self.group_size) if self.group_size else 1,
            "relation": self.relation(tile), "x_groups": self.x_groups if quantised else 0,
            "x_group_size": self.x_group_size,
        }  # fmt: skip
        return hooks | (self._codes_hooks(whole) if self.of_codes else self._floats_hooks(whole))

    def _floats_hooks(self, whole: bool) -> dict[str, Any]:
        zero, device = attribute(self.op, "zero"), self.ctx.device
        return {
            "form": "floats", "about": f"codes of {dtype_of(self.q)} become factors", "late": whole,
            "sums": "tl.float32", "type": TYPES[self.type], "zero": literal(float(zero)) if zero else "",
            "decode": quantize.decode(device, dtype_of(self.q)),
            "x_decode": quantize.decode(device, self.x_dtype) if self.x_dtype else "",
            "precision": device.dot_f32 if self.type is DType.F32 else "ieee",
        }  # fmt: skip

    def _codes_hooks(self, whole: bool) -> dict[str, Any]:
        about = f"codes of {self.x_dtype} are multiplied with codes of {dtype_of(self.q)}"
        found = {"form": "codes", "about": about, "x_zero": 0, "shift": 0}
        found |= self._e4m3_hooks() if self.x_dtype is DType.F8E4M3 else self._integer_hooks()
        late = whole and self.x_group_size == 0 and not found["x_zero"]
        wide = {"sums": found["product_type"] if late else "tl.float32", "late": late}
        return (
            found
            | wide
            | {"sums_x": bool(found["x_zero"]) or len(self.given.keys() & {"zero", "offset"}) > 0}
        )

    def _integer_hooks(self) -> dict[str, Any]:
        """Codes as i8: u4's less the zero that all have, u8's less 128."""
        dtype, zero = dtype_of(self.q), 0 if "zero" in self.given else attribute(self.op, "zero")
        spelled = {"product": "tl.dot(x_block, tl.trans(FACTOR), SUM)", "product_type": "tl.int32"}
        spelled["x_factor"] = "CODE"
        if dtype is DType.U4 and 0 <= zero < 128 - 15:
            less = f" - {zero}" if zero else ""
            return spelled | {"w_factor": f"CODE.to(tl.int8){less}"}
        if dtype is DType.U8:
            return spelled | {
                "w_factor": "(CODE ^ 128).to(tl.int8, bitcast=True)",
                "x_zero": zero - 128,
                "shift": 128,
            }
        return spelled | {"w_factor": "CODE.to(tl.int8)", "x_zero": zero}

    def _e4m3_hooks(self) -> dict[str, Any]:
        device = self.ctx.device
        factor = "from_e4m3(CODE)" + ("" if device.interpreted else ".to(tl.float16)")
        spelled = 'tl.dot(x_block, tl.trans(FACTOR), SUM, input_precision="ieee")'
        if device.arch in NATIVE_E4M3:
            factor = "CODE.to(tl.float8e4nv, bitcast=True)"
            spelled = "tl.dot(x_block, tl.trans(FACTOR), SUM, max_num_imprecise_acc=128)"
        return {"product": spelled, "product_type": "tl.float32", "x_factor": factor, "w_factor": factor}
