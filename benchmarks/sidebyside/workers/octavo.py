"""Octavo's worker."""

from __future__ import annotations

import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import runtime
from compiler.profile.limits import Limits, Probe
from runtime.artifact import Artifact
from sidebyside.worker import Turn, serve
from sidebyside.workloads import Times


class Session:
    def __init__(self, model: Path, num_threads: int, dtype: str) -> None:
        self._engine = runtime.load(model, threads=num_threads, kv_memory="2GiB")
        self._context: list[int] = []
        artifact = Artifact.open(model, verify="fast")
        self._probe = Probe(artifact, num_threads)
        self.facts: dict[str, Any] = {
            "octavo": version("octavo"),
            "digest": artifact.manifest.digest,
            "isa": artifact.kernel().isa,
            "vocab_size": artifact.manifest.model.vocab_size,
        }

    def limits(self) -> dict[str, float]:
        """What the machine does at best just now: medians of three."""
        return asdict(Limits.median([self._probe.measure() for _ in range(3)]))

    def run(self, context: list[int], prompts: list[list[int]], new_tokens: int) -> Turn:
        if context and context != self._context:
            runtime.generate(self._engine, context, max_new_tokens=1, ignore_eos=True)
            self._context = context
        hits = self._engine.stats().prefix_hit_tokens
        turn = self._timed([context + prompt for prompt in prompts], new_tokens)
        hits = self._engine.stats().prefix_hit_tokens - hits
        assert hits == len(context) * len(prompts), f"{hits} tokens were cached, not {len(context)} each"
        return turn

    def _timed(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        tokens: list[list[int]] = [[] for _ in prompts]
        first_s = now_s = 0.0
        start = time.perf_counter()
        events = runtime.generate(
            self._engine, prompts, stream=True, max_new_tokens=new_tokens, ignore_eos=True
        )
        assert not isinstance(events, list)
        for event in events:
            now_s = time.perf_counter() - start
            if event.token_id is not None:
                if not tokens[event.prompt_index]:
                    first_s = now_s
                tokens[event.prompt_index].append(event.token_id)
        return Turn(Times(first_s, now_s), tokens)


if __name__ == "__main__":
    serve(Session)
