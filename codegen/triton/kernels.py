"""The kernel table: for each op kind, how launches of its kernels are printed."""

from __future__ import annotations

from collections.abc import Callable

from codegen.triton.context import Context
from codegen.triton.embed import embed
from codegen.triton.launch import Case
from ir.graph import Op

Printer = Callable[[Context, Op], list[Case]]

KERNELS: dict[str, Printer] = {
    "embed": embed,
}
