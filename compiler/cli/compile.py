"""`octavo compile`: a checkpoint into an engine artifact, with progress per stage."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compiler.cli import values
from compiler.cli.interrupts import Interrupts
from compiler.cli.options import MaxContext

if TYPE_CHECKING:
    from compiler.cli.terminal import Terminal

INTERRUPTED = 130
_QUANTISATION = "Quantisation"


def command(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face directory, or a GGUF or ONNX file, quantised or not.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The artifact to write, NAME.octavo.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="What it will run on; may be repeated: cpu (the default), cuda:sm_80, cuda:sm_90, "
            "cuda:sm_100, hip:gfx942, or triton-interpret (for tiny models: seconds a token). Compiling "
            "needs no GPU.",
            autocompletion=values.targets,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What linears multiply, and the KV cache: f32 or bf16. Default f32, but bf16 where all "
            "targets are GPUs.",
            autocompletion=values.dtypes,
        ),
    ] = None,
    max_context: MaxContext = None,
    block: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a KV block: 8, 16, 32 or 64. Default 16, of a cache of int4 or int2 64.",
            metavar="8|16|32|64",
            autocompletion=values.blocks,
        ),
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(
            help="ISA levels to build for cpu, by comma; default v4,v3,baseline, and v4-vnni-bf16 for bf16 "
            "linears.",
            autocompletion=values.levels,
        ),
    ] = None,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="GPUs' kernels give the same bits whatever they are batched with, as the CPU's always do.",
        ),
    ] = False,
    quantize: Annotated[
        str,
        typer.Option(
            help="Weights as int4, int8, fp8, auto (int4 where a layer bears it), own (the codes of a "
            "checkpoint that comes quantised) or none: floats.",
            autocompletion=values.weight_formats,
            rich_help_panel=_QUANTISATION,
        ),
    ] = "none",
    group: Annotated[
        int | None,
        typer.Option(
            help="Inputs that share a scale: 32, 64, 128, and of int8 0 for all. Default 32.",
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="rtn rounds; gptq and awq fit weights to text. Default gptq, for fp8 rtn.",
            autocompletion=values.algorithms,
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    symmetric: Annotated[
        bool,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Groups of int4 have a scale alone, or an offset too: 4.5 bits a weight, or 5.",
            rich_help_panel=_QUANTISATION,
        ),
    ] = True,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="Modules that stay as they are: PATTERN,... or PATTERN=FORMAT, as in "
            "'lm_head,model.layers.0.*=int8'; may be repeated.",
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help="What linears read: int8 in groups of 32, int8-token, fp8 or none. Default int8 beside int "
            "weights, where a CPU is compiled for.",
            autocompletion=values.activations,
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            help="The KV cache: f32, bf16, int8, fp8, int4, or int2, an experiment. Default: as --dtype.",
            autocompletion=values.kv_formats,
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Text that weights and keys are fitted to. Default: some pages that come with Octavo.",
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Refuse a quantised model whose mean KL from what it was is more, in nats. Default: by "
            "format.",
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="self:int4 bundles the model's own weights as int4, for cpu. They draft, and the model "
            "verifies, which changes no token (octavo generate --draft self). --algorithm says how.",
            autocompletion=values.drafts,
            rich_help_panel=_QUANTISATION,
        ),
    ] = None,
    no_weights: Annotated[
        bool,
        typer.Option(
            "--no-weights",
            help="Shapes alone, from a directory with config.json: to inspect and to measure, not to load.",
        ),
    ] = False,
    dump_ir: Annotated[
        Path | None, typer.Option(help="Write the graph after every pass into this folder.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check every pass in the reference interpreter.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a directory that is not an artifact.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be read, written and taken, and stop.")
    ] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Build every kernel anew, and keep none.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout at the end.")
    ] = False,
) -> None:
    """Compile a checkpoint into an engine artifact.

    octavo compile ./SmolLM2-135M-Instruct -o smollm2.octavo

    octavo compile model.Q8_0.gguf -o model.octavo --dtype bf16 --max-context 4096

    octavo compile ./model -o model.octavo --dtype bf16 --target cpu --target cuda:sm_90

    octavo compile ./model -o model.octavo --quantize int4 --kv int8

    octavo compile ./model -o model.octavo --quantize auto --max-kl 0.05 --calibration my-texts.txt

    octavo compile ./model -o model.octavo --quantize int4 --keep 'model.layers.0.*=int8,*.down_proj'

    octavo compile model.Q4_K_M.gguf -o model.octavo --quantize own

    octavo compile model.onnx -o model.octavo --max-context 4096

    octavo compile ./model -o model.octavo --draft self:int4

    octavo compile ./model -o model.octavo --dry-run

    octavo compile ./config -o shapes.octavo --no-weights --target cuda:sm_90

    octavo compile ./model -o model.octavo --check --dump-ir stages

    Quantised weights are fitted to text and measured on text: octavo inspect shows what they cost.

    Ctrl-C leaves nothing half-written: what was at -o before is there still. Kernels that were built before,
    for this model or for another, are found by content in $OCTAVO_CACHE (~/.cache/octavo), of which
    $OCTAVO_CACHE_LIMIT (2GiB) is kept. DEBUG=1 shows each pass, 2 the final IR, 3 the IR after each pass, 4
    the generated source, 5 why patterns missed.
    """
    import compiler
    from compiler.cli.terminal import Terminal

    asked: dict[str, Any] = {
        "target": target or "cpu",
        "dtype": dtype,
        "max_context": max_context,
        "block": block,
        "isa": None if isa is None else [level.strip() for level in isa.split(",")],
        "invariant": invariant,
        "weights": not no_weights,
        "check": check,
        "cache": not no_cache,
        "force": force,
        "quantize": quantize,
        "group": group,
        "algorithm": algorithm,
        "symmetric": symmetric,
        "keep": [rule.strip() for rules in keep or () for rule in rules.split(",")],
        "activations": activations,
        "kv": kv,
        "calibration": calibration,
        "max_kl": max_kl,
        "draft": draft,
    }
    if dry_run:
        found = compiler.preflight(source, out, **asked)
        print(json.dumps(found.json) if as_json else found)
        return
    with interrupted_whole(dump_ir) as interrupts, Terminal(quiet=quiet, check=interrupts.check) as shown:
        path = compiler.compile(source, out, dump_ir=dump_ir, progress=shown, **asked)
    _print_result(path, shown, as_json, quiet)


def _print_result(path: Path, shown: Terminal, as_json: bool, quiet: bool) -> None:
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    seconds = {name: round(s, 3) for name, s in shown.seconds.items()}
    if as_json:
        found = {"artifact": str(path), "bytes": num_bytes, "seconds": seconds}
        print(json.dumps(found | {"preflight": shown.found.json if shown.found else None}))
    elif not quiet:
        print(f"{path}: {num_bytes / 1e6:,.0f} MB in {sum(seconds.values()):.1f} s")
        if sys.stdout.isatty():
            print(_next(path))


def _next(path: Path) -> str:
    """A command that runs the artifact, for whoever reads along."""
    name = shlex.quote(min(str(path), os.path.relpath(path), key=len))
    if (path / "tokenizer" / "chat_template.jinja").is_file():
        return f"Talk with it: octavo chat {name}"
    return f'Run it: octavo generate {name} "Once upon a time"'


@contextmanager
def interrupted_whole(dump_ir: Path | None) -> Iterator[Interrupts]:
    """Within it a signal ends the command, with nothing half-written, a line and exit code 130."""
    from codegen.scratch import Removed
    from codegen.tools import Tools
    from compiler.artifact import ArtifactWriter

    whole = (
        ArtifactWriter.__enter__, ArtifactWriter.__exit__, ArtifactWriter.publish, Removed.__exit__,
        Tools.__exit__,
    )  # fmt: skip
    with Interrupts(tuple(function.__code__ for function in whole)) as interrupts:
        try:
            yield interrupts
        except BaseException as error:
            if interrupts.signum is None and not isinstance(error, KeyboardInterrupt):
                raise
            besides = f" but the stages in {dump_ir}" if dump_ir is not None and dump_ir.is_dir() else ""
            print(f"octavo: interrupted; nothing was written{besides}", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from error
