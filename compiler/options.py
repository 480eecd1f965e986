"""What a compile was asked for, and what no compile can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen.kv_block import BLOCKS
from compiler.errors import CompileError
from compiler.importers.model import MAX_CONTEXT
from compiler.quantization.draft import draft_quantization, own_part
from compiler.quantization.options import Quantization, check_quantization
from compiler.targets import Target
from ir.types import DType
from passes.paging.formats import FORMATS, default_block

DTYPES = ("f32", "bf16")


@dataclass(frozen=True)
class Options:
    """What a compile was asked for; see compiler.compile."""

    dtype: str | None = None
    max_context: int | None = None
    block: int | None = None  # None: what the cache's format asks for
    weights: bool = True
    check: bool = False
    dump_ir: Path | None = None
    cache: bool = True
    quantization: Quantization = field(default_factory=Quantization)
    draft: str | None = None
    example_inputs: Any = None


def block_size(options: Options) -> int:
    """Tokens of a KV block."""
    return default_block(options.quantization.kv or "") if options.block is None else options.block


def element_type(options: Options, targets: Sequence[Target]) -> str:
    """Of what linears multiply."""
    return options.dtype or ("bf16" if all(t.prefers_bf16 for t in targets) else "f32")


def weight_bytes(options: Options, dtype: str) -> float:
    """Of one weight as it is written, with the scales that it shares; of dtype where it is not quantised."""
    found = options.quantization.bits_per_weight
    return DType(dtype).size_bytes if found is None else found / 8


def draft_weight_bytes(options: Options) -> float:
    """Of one weight of the draft; 0 where there is none."""
    if options.draft is None:
        return 0.0
    return (draft_quantization(options.quantization).bits_per_weight or 0.0) / 8


def check_options(options: Options) -> None:
    """Raises CompileError on a value that no compile has."""
    dtype, context = options.dtype, options.max_context
    check_quantization(options.quantization if options.draft is None else own_part(options.quantization))
    if dtype is not None and dtype not in DTYPES:
        what, todo = "not an element type of weights", f"There are {', '.join(DTYPES)}"
        raise CompileError(what, where=f"--dtype {dtype}", todo=todo)
    if context is not None and not 1 <= context <= MAX_CONTEXT:
        what, todo = "not a number of tokens of a context", f"Use one from 1 to {MAX_CONTEXT}"
        raise CompileError(what, where=f"--max-context {context}", todo=todo)
    if options.block is not None and options.block not in BLOCKS:
        sizes = ", ".join(map(str, BLOCKS))
        what, todo = "not a number of tokens of a KV block", f"There are {sizes}"
        raise CompileError(what, where=f"--block {options.block}", todo=todo)
    strip = FORMATS[kv].block_strip if (kv := options.quantization.kv or "") in FORMATS else 1
    if options.block is not None and options.block % strip:
        what, todo = f"codes of {kv} are packed {strip} tokens at a time", "Leave it out, or give --block 64"
        raise CompileError(what, where=f"--block {options.block}", todo=todo)
    if options.check and not options.weights:
        what = "it runs the model, which needs its weights"
        raise CompileError(what, where="--check", todo="Leave out --no-weights")
