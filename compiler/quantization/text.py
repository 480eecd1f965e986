"""Text that quantisation is fitted to and judged by, as windows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compiler.errors import CompileError
from compiler.quantization.grid import Array
from ir.graph import Graph
from ir.types import KV
from runtime.tokenizer import Tokenizer

CALIBRATION, HELD_OUT = "calibration", "heldout"
LONGEST = 1 << 22  # characters that are read of a user's text: some hundred for each token that is used
FEWEST = 2  # tokens of a window that say something of the model
RANDOM = "random tokens, for want of a tokenizer"


@dataclass(frozen=True)
class Windows:
    """Token ids of stretches of text, each a request of its own. source: where the text comes from."""

    ids: tuple[Array, ...]
    source: str

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))


def default_text(name: str) -> str:
    """The text that comes with the compiler, CALIBRATION or HELD_OUT: they have no passage in common."""
    return (Path(__file__).parent / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def read_text(path: Path) -> str:
    """A user's text, LONGEST characters of it. Raises CompileError."""
    todo = "Give a text file in UTF-8 of what the model will be used for"
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe is empty when read again
            raise CompileError("it is no file", where=f"--calibration {path}", todo=todo)
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST)
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or "it is no text in UTF-8"
        what = "it is no path" if "\0" in str(path) else what
        raise CompileError(what, where=f"--calibration {path}", todo=todo) from error
    if not text.strip():
        raise CompileError("it is empty", where=f"--calibration {path}", todo=todo)
    return text


def windows(
    tokenizer: Tokenizer | None, text: str, source: str, size: int, count: int, vocab: int
) -> Windows:
    """At most `count` windows of `size` tokens from the beginning of a text; the last one may be shorter.

    Without a tokenizer they are random tokens of a vocabulary of `vocab`. Raises CompileError where the text
    has too few tokens.
    """
    if tokenizer is None:
        ids = np.random.default_rng(0).integers(0, vocab, (count, size), dtype=np.int32)
        return Windows(tuple(ids), RANDOM)
    start = tokenizer.encode("")
    tokens = tokenizer.encode(text)[len(start) :]
    step = max(1, size - len(start))
    cut = [[*start, *tokens[i : i + step]][:size] for i in range(0, min(len(tokens), count * step), step)]
    found = tuple(np.array(ids, np.int32) for ids in cut if len(ids) >= FEWEST)
    if not found:
        what, todo = f"the text has {len(tokens)} tokens", "Give some pages of text"
        raise CompileError(what, where=source, todo=todo)
    return Windows(found, source)


def packed(given: Sequence[Array], blocks: Mapping[str, int], every: int = 1) -> dict[str, Array]:
    """The paged graph's inputs for one step that computes windows whole, each a request.

    blocks: the block size of each KV input. every: logits are asked for at every so many tokens.
    """
    lengths = [len(ids) for ids in given]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    pos = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    rows = np.concatenate([np.arange(s, s + n, every) for s, n in zip(starts, lengths, strict=False)])
    inputs = {
        "ids": np.concatenate(given).astype(np.int32),
        "pos": pos,
        "starts": starts,
        "lens": np.array(lengths, np.int32),
        "rows": rows.astype(np.int32),
    }
    for name, block in blocks.items():
        inputs |= _paged(name.removeprefix("kv"), lengths, block)
    return inputs


def most_tokens(graph: Graph) -> list[int]:
    """Of a request, by the tables of each KV group."""
    bounds = {v.name: graph.dims.get(f"M{v.name.removeprefix('kv')}", (0, None))[1] for v in graph.inputs}
    groups = [(v.type.block, bounds[v.name]) for v in graph.inputs if isinstance(v.type, KV)]
    return [block * most for block, most in groups if most is not None]


def _paged(group: str, lengths: Sequence[int], block: int) -> dict[str, Array]:
    """A group's table and slots: requests' blocks lie one after the other, from block 1 on."""
    counts = [-(-n // block) for n in lengths]
    firsts = np.cumsum([1, *counts])
    table = np.zeros((len(lengths), max(counts)), np.int32)
    for row, first, count in zip(table, firsts, counts, strict=False):
        row[:count] = np.arange(first, first + count)
    slots = np.concatenate([f * block + np.arange(n) for f, n in zip(firsts, lengths, strict=False)])
    return {f"table{group}": table, f"slots{group}": slots.astype(np.int32)}


def num_blocks(given: Sequence[Array], block: int) -> int:
    """Blocks of a group that `packed` uses, the unused block 0 included."""
    return 1 + sum(-(-len(ids) // block) for ids in given)
