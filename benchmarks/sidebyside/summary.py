"""Medians of what was measured, one row for each figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from sidebyside.peers import PEERS
from sidebyside.results import Result
from sidebyside.workloads import WORKLOADS, Workload

# By figure, what bounds it.
SHARES = {"decode": "bandwidth_share", "prefill": "peak_share"}


@dataclass(frozen=True)
class Row:
    """Medians over the pairs; the ratio is the median of the pairs' ratios, Octavo over the peer."""

    peer: str
    dtype: str
    peer_format: str
    workload: Workload
    figure: str
    octavo: float  # tokens per second
    peer_rate: float
    ratio: float
    lowest: float
    highest: float
    bandwidth: float  # bytes per second
    share: float | None  # Octavo's, of the bound
    agreement: float


def rows(results: Iterable[Result]) -> Iterator[Row]:
    """By peer, element type and workload."""
    for result in sorted(results, key=_place):
        for figure in WORKLOADS[result.workload].figures:
            yield row(result, figure)


def row(result: Result, figure: str) -> Row:
    workload, pairs = WORKLOADS[result.workload], result.measured.pairs
    octavo = [workload.rates(pair.octavo)[figure] for pair in pairs]
    peer = [workload.rates(pair.peer)[figure] for pair in pairs]
    ratios = [ours / theirs for ours, theirs in zip(octavo, peer, strict=True)]
    return Row(
        result.peer,
        result.dtype,
        result.peer_format,
        workload,
        figure,
        octavo=median(octavo),
        peer_rate=median(peer),
        ratio=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        bandwidth=median(pair.limits.read_bytes_per_s for pair in pairs),
        share=result.shares[SHARES[figure]] if figure in SHARES else None,
        agreement=result.measured.agreement,
    )


def _place(result: Result) -> tuple[int, str, int]:
    return list(PEERS).index(result.peer), result.dtype, list(WORKLOADS).index(result.workload)
