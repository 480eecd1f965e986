"""One comparison: the peer's environment and model, both workers, all workloads, results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from compiler.profile.limits import Limits
from compiler.profile.shares import Throughput, shares
from runtime.artifact import Artifact
from sidebyside import environment
from sidebyside.pairs import Pairs, measure
from sidebyside.peers import Peer
from sidebyside.results import Result
from sidebyside.worker import Worker
from sidebyside.workloads import Workload


@dataclass(frozen=True)
class Setup:
    source: Path  # the GGUF file that all models come from
    engines: Mapping[str, Path]  # Octavo's artifacts by format
    folder: Path  # where environments, models and logs go
    python: Path | None  # of an environment that has the peer already
    num_threads: int
    num_pairs: int


def compare(
    peer: Peer, dtypes: Sequence[str], workloads: Sequence[Workload], setup: Setup
) -> Iterator[Result]:
    """One result after the other, as they come."""
    python = setup.python or environment.create(peer, setup.folder / peer.name)
    logs = setup.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for dtype in dtypes:
        model = peer.formats[dtype].convert(setup.source, setup.folder / "models", python)
        with (
            Worker(Path(sys.executable), "octavo", logs / "octavo.log") as ours,
            Worker(python, peer.name, logs / f"{peer.name}.log", peer.variables) as theirs,
        ):
            octavo_facts = ours.load(setup.engines[dtype], setup.num_threads, dtype)
            peer_facts = theirs.load(model, setup.num_threads, "f32" if dtype == "f32" else "bf16")
            rng = np.random.default_rng(0)  # one for all, or prompts begin alike and prefix caches hit
            for workload in workloads:
                print(f"{peer.title}, {dtype}: {workload.title}", file=sys.stderr)
                taken = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime())
                measured = measure(workload, ours, theirs, setup.num_pairs, rng, octavo_facts["vocab_size"])
                yield Result(
                    peer=peer.name,
                    dtype=dtype,
                    peer_format=peer.formats[dtype].name,
                    workload=workload.name,
                    taken=taken,
                    num_threads=setup.num_threads,
                    octavo=octavo_facts,
                    facts=peer_facts,
                    measured=measured,
                    shares=_shares(setup.engines[dtype], workload, measured),
                )


def _shares(engine: Path, workload: Workload, measured: Pairs) -> dict[str, float]:
    """Of the bounds, by the medians of Octavo's times and of the machine's limits."""
    first_s = median(pair.octavo.first_s for pair in measured.pairs)
    end_s = median(pair.octavo.end_s for pair in measured.pairs)
    found = Throughput(
        workload.num_requests,
        workload.prompt_tokens,
        workload.context_tokens,
        workload.new_tokens,
        prefill_s=first_s,
        decode_s=end_s - first_s,
        decode_tokens=workload.num_requests * (workload.new_tokens - 1),
    )
    limits = Limits.median([pair.limits for pair in measured.pairs])
    return shares(Artifact.open(engine, verify="fast"), found, limits)
