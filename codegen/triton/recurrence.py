"""Linear recurrences: a request's tokens go one by one through a head's state, which stays in registers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

from codegen.triton.context import FLOATS, Context, dtype_of, operands, refuse, shape_of
from codegen.triton.kv_layout import StreamLayout
from codegen.triton.launch import Arg, Case, always, cdiv, expression
from codegen.triton.render import render
from codegen.triton.schedule import power_of_two
from ir.graph import Op, Value, Weight
from ir.types import KV

TILE = 4096  # elements of the state that a program holds where its columns can be so few
MOST = 16384  # and at most
COLUMNS = 64


@dataclass(frozen=True)
class Input:
    """What a template asks of one of a token's inputs.

    at, lane: spell a program's elements of a row of the operand, and what is added to their place in the
    cache. head: the stream's. inside: spells a mask of lanes, nothing for a single one. writer: whether a
    program that has them is the one that writes them to the cache.
    """

    name: str
    ld: int
    kept: StreamLayout
    head: str
    at: str
    lane: str
    inside: str
    writer: str

    @property
    def mask(self) -> str:
        return f", mask={self.inside}" if self.inside else ""

    @property
    def masked(self) -> str:
        """What a load says of its mask."""
        return f"{self.mask}, other=0" if self.inside else ""


@dataclass(frozen=True)
class Recurrence:
    ctx: Context
    op: Op

    @cached_property
    def given(self) -> dict[str, Value | Weight]:
        return operands(self.op)

    @cached_property
    def kept(self) -> dict[str, StreamLayout]:
        """By the stream's name."""
        kv = cast(KV, self.given["kv"].type)
        return {s.name: StreamLayout(kv, self.op.attr("layer"), i) for i, s in enumerate(kv.streams)}

    @cached_property
    def keys(self) -> int:
        return self.kept["key"].size

    @cached_property
    def values(self) -> int:
        return self.kept["value"].size

    @cached_property
    def heads(self) -> int:
        return self.kept["value"].heads

    @cached_property
    def group(self) -> int:
        """Heads of values that share one of keys."""
        return self.heads // self.kept["key"].heads

    @cached_property
    def channels(self) -> int:
        """Rows of a program's tile of the state: all keys' channels."""
        return power_of_two(self.keys)

    @cached_property
    def columns(self) -> int:
        return max(1, min(power_of_two(self.values), COLUMNS, TILE // self.channels))

    @cached_property
    def num_warps(self) -> int:
        lanes = 16 if "rates" in self.given else 32  # elements of a lane; rates take as many registers again
        warps = self.channels * self.columns // (lanes * self.ctx.device.warp_size)
        return 1 if self.ctx.device.interpreted else max(1, min(16, warps))

    # --- a token's inputs

    def inputs(self) -> list[Input]:
        found = [self._input("k", "key", "channel"), self._input("v", "value", "column")]
        size = self.kept["decay"].size
        along = "column" if "rates" in self.given else "channel" if size > 1 else ""
        found.append(self._input("decay", "decay", along))
        return [*found, self._input("beta", "beta", "")] if "beta" in self.given else found

    def _input(self, name: str, stream: str, lanes: str) -> Input:
        """lanes: what a program's elements lie along: "channel", "column", or nothing for a single one."""
        kept = self.kept[stream]
        lane = f" + {lanes}" if lanes else ""
        head = f"head // {self.group}" if name == "k" else "head"
        inside = {"channel": "in_k", "column": "in_v"}.get(lanes, "")
        writer = "first_head" if name == "k" else "True" if lanes == "column" else "first_slice"
        at = f"{head} * {kept.size}{lane}"
        return Input(name, self.ctx.ld(self.given[name]), kept, f"({head})", at, lane, inside, writer)

    def factor(self) -> str:
        """Spells the logarithm of what the state is multiplied by."""
        if "rates" in self.given:
            return "decay_t[None, :] * rate"
        return "decay_t[:, None]" if self.kept["decay"].size > 1 else "decay_t"

    # --- the launch

    def args(self) -> dict[str, Arg]:
        state, table = cast(Value, self.given["kv"]), cast(Value, self.given["table"])
        names = [n for n in ("q", "k", "v", "decay", "beta", "rates") if n in self.given]
        found = {name: self.ctx.pointer(self.given[name]) for name in (*names, "table", "lens", "starts")}
        short = {"key": "k", "value": "v"}
        found |= {f"kept_{short.get(n, n)}": kept.codes(self.ctx, state) for n, kept in self.kept.items()}
        found["out"] = self.ctx.pointer(self.op.outs[0])
        return found | {"table_width": self.ctx.size(shape_of(table)[1])}

    def body(self) -> str:
        return render(
            "recurrence",
            keys=self.keys,
            values=self.values,
            group=self.group,
            block=cast(KV, self.given["kv"].type).block,
            kept=self.kept,
            inputs=self.inputs(),
            factor=self.factor(),
            beta="beta" in self.given,
            rates="rates" in self.given,
            q_ld=self.ctx.ld(self.given["q"]),
            out_ld=self.ctx.ld(self.op.outs[0]),
        )


def paged_recurrence(ctx: Context, op: Op) -> list[Case]:
    """A program for each request, head and slice of the values' columns, whatever the step."""
    found = Recurrence(ctx, op)
    for name in ("q", "k", "v", "decay", "beta", "rates"):
        if name in found.given and dtype_of(found.given[name]) not in FLOATS:
            raise refuse(op, f"{name} of type {dtype_of(found.given[name])}; there is {', '.join(FLOATS)}")
    if found.channels > MOST:
        raise refuse(op, f"keys of {found.keys} channels; a program holds {MOST} at most")
    requests = expression(shape_of(found.given["lens"])[0])
    launch = ctx.launch(
        "recurrence",
        found.body(),
        found.args(),
        (requests, found.heads, cdiv(found.values, found.columns)),
        {"ROWS": found.channels, "BLOCK": found.columns},
        num_warps=found.num_warps,
    )
    return always(launch)
