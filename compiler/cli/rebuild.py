"""`octavo rebuild`: an artifact made again, so that no code of it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiler.cli.options import Digest


def command(
    engine: Annotated[Path, typer.Argument(help="An engine artifact, from octavo compile.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The artifact to write.")],
    isa: Annotated[
        list[str] | None, typer.Option(help="An ISA level; may be repeated. Default: all.")
    ] = None,
    digest: Digest = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a directory that is no artifact.")] = False,
) -> None:
    """Make an artifact again from its graph and weights: the kernels are generated and built here.

    The artifact's own libraries and sources are neither run nor built. docs/security.md says what this gives.

    octavo rebuild downloaded.octavo -o mine.octavo

    octavo rebuild downloaded.octavo -o mine.octavo --isa v3
    """
    from compiler.rebuild import rebuild

    print(rebuild(engine, out, isa=isa, digest=digest, force=force))
