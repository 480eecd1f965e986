"""`octavo explain`: what the compiler makes of a model, layer by layer, or why it refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compiler.cli import values
from compiler.cli.errors import BAD_INPUT
from compiler.cli.options import Block, MaxContext

if TYPE_CHECKING:
    from compiler.cli.terminal import Terminal


def command(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face directory (its config.json is enough), a GGUF or ONNX file, an "
            "artifact NAME.octavo, or a graph as text, NAME.ir."
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Print this layer's ops too, before and after the passes.", min=0)
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of linears and the KV cache, as for compile: f32 or bf16.", autocompletion=values.dtypes
        ),
    ] = "f32",
    max_context: MaxContext = None,
    block: Block = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, of every layer.")] = False,
    all_transformers: Annotated[
        bool,
        typer.Option(
            "--all-transformers",
            help="Instead of a model: what is made of each model type of the installed transformers.",
        ),
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(help="With --all-transformers: write the table to this file too.", metavar="FILE"),
    ] = None,
) -> None:
    """Say what the compiler recognises in a model, layer by layer, or the first reason why it refuses it.

    octavo explain ./SmolLM2-135M-Instruct

    octavo explain model.Q8_0.gguf --dtype bf16 --max-context 4096

    octavo explain ./config --layer 0

    octavo explain model.octavo --json

    octavo explain --all-transformers

    Neither weights nor the device are needed. A model is traced with PyTorch, which takes seconds. The exit
    code is 2 where the model is refused. The table of all model types takes minutes.
    """
    import compiler
    from compiler.cli.terminal import Terminal
    from compiler.errors import CompileError

    shown = Terminal()
    if all_transformers:
        if source is not None or layer is not None:
            raise CompileError(
                "it takes no model and no layer", where="--all-transformers", todo="Give it alone"
            )
        _print_all(shown, as_json, markdown)
        return
    if source is None:
        todo = "Give a checkpoint's path, or --all-transformers"
        raise CompileError("no model is given", where="SOURCE", todo=todo)
    if markdown is not None:
        raise CompileError(
            "it is for the table of --all-transformers", where="--markdown", todo="Leave it out"
        )
    with shown:
        found = compiler.explain(
            source, dtype=dtype, max_context=max_context, block=block, layer=layer, progress=shown
        )
    print(json.dumps(found.json) if as_json else str(found), end="\n" if as_json else "")
    if found.refused is not None:
        raise typer.Exit(BAD_INPUT)


def _print_all(shown: Terminal, as_json: bool, page: Path | None) -> None:
    from compiler.explanation.coverage import cover
    from compiler.explanation.coverage_text import markdown

    with shown:
        found = cover(progress=shown)
    if page is not None:
        page.write_text(markdown(found), "utf-8")
    print(json.dumps(found.json) if as_json else str(found), end="\n" if as_json else "")
