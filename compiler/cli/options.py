"""Options that several subcommands share: the engine; how tokens are sampled, as Sampling takes it; where it
runs and what it may take of memory, as load() takes it; and what a compile makes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from compiler.cli import values

_PANEL = "Memory"

EnginePath = Annotated[
    Path, typer.Argument(help="An engine artifact, NAME.octavo.", autocompletion=values.artifacts)
]

Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0.0)]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", min=0)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely, relative to the best.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: tokens of prompt and output are less likely to come again.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken from the logit of each token that the output has.")
]
FrequencyPenalty = Annotated[float, typer.Option(help="And for each time that it has it.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS", help="Added to a token's logit; -100 forbids it. By token id; may be repeated."
    ),
]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
Timeout = Annotated[float | None, typer.Option(help="End after this many seconds with what there is.")]

Target = Annotated[
    str | None,
    typer.Option(
        help="Default: the best of the engine's that this machine can run.", autocompletion=values.targets
    ),
]
Digest = Annotated[
    str | None,
    typer.Option(help="Refuse an engine whose digest, as octavo inspect prints it, is another."),
]
Threads = Annotated[int | None, typer.Option(help="Default: the cores this process may use.")]

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

_DRAFTS = "Drafts"

Draft = Annotated[
    str | None,
    typer.Option(
        help="What proposes tokens, of which several are then verified in one step: lookup (what came after "
        "the last ones before), self (of an engine compiled with --draft), or another engine with the same "
        "tokenizer. No token changes.",
        metavar="lookup|self|ENGINE",
        autocompletion=values.drafters,
        rich_help_panel=_DRAFTS,
    ),
]
MaxDraftTokens = Annotated[
    int | None,
    typer.Option(
        help="Of a request in a step, at most. Default 8; fewer where they do not pay.",
        rich_help_panel=_DRAFTS,
    ),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        help="rejection: what is sampled keeps its distribution, not its tokens, and more drafts are "
        "accepted. Default exact.",
        metavar="exact|rejection",
        autocompletion=values.acceptances,
        rich_help_panel=_DRAFTS,
    ),
]

MaxContext = Annotated[int | None, typer.Option(help="Longest sequence; default the model's own.")]
Block = Annotated[
    int,
    typer.Option(
        help="Tokens of a KV block: 8, 16, 32 or 64.", metavar="8|16|32|64", autocompletion=values.blocks
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """Those that were given, for load() or plan()."""
    return {name: value for name, value in options.items() if value is not None}
