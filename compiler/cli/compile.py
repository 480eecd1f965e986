"""`octavo compile`: a checkpoint into an engine artifact, with progress per stage."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from compiler.cli.errors import debug_level
from compiler.progress import Progress

if TYPE_CHECKING:
    from ir.graph import Graph
    from ir.rewrite import Miss


def command(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face directory or a GGUF file, quantised or not.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The artifact to write, NAME.octavo.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="What it will run on; may be repeated: cpu (the default), cuda:sm_80, cuda:sm_90, "
            "cuda:sm_100, hip:gfx942, or triton-interpret (for tiny models: seconds a token). Compiling "
            "needs no GPU.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="What linears multiply, and the KV cache: f32 or bf16. Default f32, but bf16 where all "
            "targets are GPUs."
        ),
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Longest sequence; default the model's own.")
    ] = None,
    block: Annotated[
        int, typer.Option(help="Tokens of a KV block: 8, 16, 32 or 64.", metavar="8|16|32|64")
    ] = 16,
    isa: Annotated[
        str | None,
        typer.Option(
            help="ISA levels to build for cpu, by comma; default v4,v3,baseline, and v4-vnni-bf16 for bf16 "
            "linears."
        ),
    ] = None,
    invariant: Annotated[
        bool,
        typer.Option(
            "--invariant",
            help="GPUs' kernels give the same bits whatever they are batched with, as the CPU's always do.",
        ),
    ] = False,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Compile a checkpoint into an engine artifact.

    octavo compile ./SmolLM2-135M-Instruct -o smollm2.octavo

    octavo compile model.Q8_0.gguf -o model.octavo --dtype bf16 --max-context 4096

    octavo compile ./model -o model.octavo --dtype bf16 --target cpu --target cuda:sm_90

    octavo compile ./config -o shapes.octavo --no-weights --target cuda:sm_90

    octavo compile ./model -o model.octavo --check --dump-ir stages
    """
    import compiler

    shown = Terminal()
    with _terminated_like_interrupted(), shown:
        path = compiler.compile(
            source,
            out,
            target=target or "cpu",
            dtype=dtype,
            max_context=max_context,
            block=block,
            isa=None if isa is None else [level.strip() for level in isa.split(",")],
            invariant=invariant,
            weights=not no_weights,
            check=check,
            dump_ir=dump_ir,
            force=force,
            progress=shown,
        )
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    seconds = {name: round(s, 3) for name, s in shown.seconds.items()}
    if as_json:
        print(json.dumps({"artifact": str(path), "bytes": num_bytes, "seconds": seconds}))
    else:
        print(f"{path}: {num_bytes / 1e6:,.0f} MB in {sum(seconds.values()):.1f} s")


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Within it, SIGTERM raises KeyboardInterrupt, so that it too removes what was half written."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminal(Progress):
    """Progress on stderr: the running stage on a terminal, a line per slow stage, and DEBUG's levels."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._debug = debug_level()
        self._console = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
        self._status = self._console.status("")
        self._stage = ""
        self._started = 0.0

    def __enter__(self) -> Terminal:
        self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._status.stop()

    def note(self, text: str) -> None:
        self._console.print(text)

    def stage(self, name: str) -> None:
        self._end()
        self._stage, self._started = name, time.perf_counter()
        self._status.update(name)

    def advance(self, done: int, total: int) -> None:
        self._status.update(f"{self._stage} {done}/{total}")

    def graph(self, name: str, graph: Graph, count: int, misses: Sequence[Miss]) -> None:
        from ir.text import print_graph

        if self._debug >= 3:
            self._console.print(f"// after {name}\n{print_graph(graph)}")
        if self._debug >= 1:
            self._console.print(f"{name}: {count} changes, {len(graph.ops)} ops")
        for miss in misses if self._debug >= 5 else ():
            self._console.print(f"  {name} missed: {miss}")

    def lowered(self, graph: Graph) -> None:
        from ir.text import print_graph

        if self._debug == 2:
            self._console.print(print_graph(graph))

    def sources(self, files: Mapping[str, str]) -> None:
        for name, text in files.items() if self._debug >= 4 else ():
            self._console.print(f"// {name}\n{text}")

    def _end(self) -> None:
        if not self._stage:
            return
        took = time.perf_counter() - self._started
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + took
        if self._debug >= 1 or took >= 1.0:
            self._console.print(f"  {self._stage:20} {took:6.1f} s")
        self._stage = ""
