"""`octavo explain`: what the compiler makes of a model, layer by layer, or why it refuses it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from compiler.cli import values
from compiler.cli.errors import BAD_INPUT
from compiler.cli.options import Block, MaxContext


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face directory (its config.json is enough), a GGUF or ONNX file, an "
            "artifact NAME.octavo, or a graph as text, NAME.ir."
        ),
    ],
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
) -> None:
    """Say what the compiler recognises in a model, layer by layer, or the first reason why it refuses it.

    octavo explain ./SmolLM2-135M-Instruct

    octavo explain model.Q8_0.gguf --dtype bf16 --max-context 4096

    octavo explain ./config --layer 0

    octavo explain model.octavo --json

    Neither weights nor the device are needed. A model is traced with PyTorch, which takes seconds. The exit
    code is 2 where the model is refused.
    """
    import compiler
    from compiler.cli.terminal import Terminal

    shown = Terminal()
    with shown:
        found = compiler.explain(
            source, dtype=dtype, max_context=max_context, block=block, layer=layer, progress=shown
        )
    print(json.dumps(found.json) if as_json else str(found), end="\n" if as_json else "")
    if found.refused is not None:
        raise typer.Exit(BAD_INPUT)
