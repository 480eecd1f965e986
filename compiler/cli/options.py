"""Options that several subcommands share: what an engine may take of memory, as load() takes them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_PANEL = "Memory"

KvMemory = Annotated[
    str | None,
    typer.Option(
        help="Of the KV cache: '2GiB', or a share of what all else leaves free, '40%'. Default 50%, of a "
        "GPU's 90%.",
        rich_help_panel=_PANEL,
    ),
]
KvBlocks = Annotated[
    int | None, typer.Option(help="In its place: blocks in every KV group.", rich_help_panel=_PANEL)
]
SwapMemory = Annotated[
    str | None,
    typer.Option(
        help="Of the host, for preempted requests, which else are computed again. Default 0.",
        rich_help_panel=_PANEL,
    ),
]
MaxStepTokens = Annotated[
    int | None,
    typer.Option(help="Tokens computed at once, over all requests. Default 512.", rich_help_panel=_PANEL),
]
MaxRequests = Annotated[
    int | None, typer.Option(help="Requests that run at once. Default 64.", rich_help_panel=_PANEL)
]


def given(**options: Any) -> dict[str, Any]:
    """Those that were given, for load() or plan()."""
    return {name: value for name, value in options.items() if value is not None}
