"""What quantisation costs: divergence from float32 on a text, and keys copied over a long context."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from qualitybench import needle as needles
from qualitybench.divergence import Divergence, divergence
from qualitybench.models import Model, artifact, gguf

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Text = Annotated[Path, typer.Argument(help="A file of text, held out of all calibration.")]
Engines = Annotated[list[str], typer.Option("--engine", help="NAME=ARTIFACT, may be repeated.")]
Reference = Annotated[Path, typer.Option(help="The artifact of the same checkpoint at f32.")]
Threads = Annotated[int, typer.Option(min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("divergence")
def command(
    text: Text,
    reference: Reference,
    engine: Engines = [],  # noqa: B006 (typer copies it)
    gguf_reference: Annotated[
        Path | None, typer.Option(help="The same weights as a GGUF file of F32.")
    ] = None,
    gguf_file: Annotated[list[str], typer.Option("--gguf", help="NAME=FILE, may be repeated.")] = [],  # noqa: B006
    llamacpp: Annotated[Path | None, typer.Option(help="An environment with llama-cpp-python.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Pieces of the text, in order.")] = 2,
    length: Annotated[int, typer.Option(min=2, help="Tokens in each.")] = 1024,
    threads: Threads = 2,
    as_json: Json = False,
) -> None:
    """KL, top-1 agreement and perplexity of each beside its engine's own float32 run, and bits a weight."""
    ids = _windows(reference, text, windows, length)
    runs = [(artifact("f32", reference, threads), [artifact(*_named(e), threads) for e in engine])]
    if gguf_reference is not None:
        if llamacpp is None:
            raise typer.BadParameter("--llamacpp: GGUF files need an environment with llama-cpp-python")
        python = llamacpp / "bin" / "python"
        beside = [gguf(*_named(file), threads, python) for file in gguf_file]
        runs.append((gguf("F32", gguf_reference, threads, python), beside))
    rows = [row for exact, others in runs for row in _compared(exact, others, ids)]
    if as_json:
        print(
            json.dumps({"text": text.name, "windows": windows, "length": length, "results": rows}, indent=1)
        )
    else:
        Console(width=110).print(_table(rows))


@app.command("needle")
def needle(
    text: Text,
    reference: Reference,
    engine: Engines = [],  # noqa: B006 (typer copies it)
    context: Annotated[int, typer.Option(min=500, help="Tokens of a prompt.")] = 3000,
    depths: Annotated[int, typer.Option(min=1)] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Keys at each depth.")] = 3,
    threads: Threads = 2,
    as_json: Json = False,
) -> None:
    """Copies of a random 12-digit key at several depths of a long prompt, by each artifact."""
    asked = list(needles.cases(reference, text.read_text(), context, depths, range(seeds)))
    rows: list[dict[str, Any]] = []
    for name, path in [("f32", reference), *map(_named, engine)]:
        rows.append({"name": name, **needles.told(asked, needles.copied(path, asked, threads))})
        if not as_json:
            print(
                "{name}: {exact} of {num_cases} keys, {digit_share:.1%} of digits".format(**rows[-1]),
                flush=True,
            )
    if as_json:
        print(json.dumps({"text": text.name, "context": context, "results": rows}, indent=1))


def _named(given: str) -> tuple[str, Path]:
    name, _, path = given.partition("=")
    if not path or not Path(path).exists():
        raise typer.BadParameter(f"{given!r}: give NAME=PATH, of what exists")
    return name, Path(path)


def _windows(engine: Path, text: Path, count: int, length: int) -> np.ndarray:
    """Token ids [W, S] of the text's start, by the artifact's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text(), add_special_tokens=False).ids
    if len(ids) < count * length:
        raise typer.BadParameter(f"{text} has {len(ids):,} tokens, fewer than {count} x {length}")
    return np.array(ids[: count * length], np.int32).reshape(count, length)


def _compared(exact: Model, others: Iterable[Model], ids: np.ndarray) -> Iterable[dict[str, Any]]:
    """A row for each. Logits lie in files meanwhile: 400 MB for 2 windows of 1,024 and 49,152 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, given = Path(folder) / "exact.npy", Path(folder) / "found.npy"
        exact.write(ids, wanted)
        reference = np.load(wanted, mmap_mode="r")
        for model in others:
            model.write(ids, given)
            found = divergence(reference, np.load(given, mmap_mode="r"), ids)
            print(f"{model.engine} {model.name}: mean KL {found.mean_kl:.5f}", file=sys.stderr, flush=True)
            bits = 32 * model.num_bytes / exact.num_bytes
            yield {"engine": model.engine, "name": model.name, "bits_per_weight": bits, **asdict(found)}


HEADINGS = ("engine", "name", "bits/weight", "mean KL", "p99 KL", "top-1", "perplexity", "ratio")


def _table(rows: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        engine, name, bits = row["engine"], row["name"], f"{row['bits_per_weight']:.2f}"
        d = Divergence(**{key: row[key] for key in Divergence.__annotations__})
        table.add_row(engine, name, bits, f"{d.mean_kl:.5f}", f"{d.p99_kl:.4f}", f"{d.top_agreement:.2%}",
                      f"{d.perplexity:.3f}", f"{d.perplexity_ratio:.4f}")  # fmt: skip
    return table


if __name__ == "__main__":
    try:
        app()
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
