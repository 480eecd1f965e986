"""onnxruntime-genai's generator; requests of one length at once as one batch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as lib

from sidebyside.worker import Turn, serve
from sidebyside.workloads import Times


class Session:
    def __init__(self, model: Path, num_threads: int, dtype: str) -> None:
        config = lib.Config(str(model))
        options = {"session_options": {"intra_op_num_threads": num_threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = lib.Model(config)
        self._kept: tuple[list[int], int, Any] | None = None  # a context, its room, who has computed it
        self.facts: dict[str, Any] = {"onnxruntime-genai": lib.__version__}

    def run(self, context: list[int], prompts: list[list[int]], new_tokens: int) -> Turn:
        length = len(context) + len(prompts[0]) + new_tokens
        generator = self._generator(len(prompts), length, context)
        start = time.perf_counter()
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        first_s = time.perf_counter() - start
        for _ in range(new_tokens - 1):
            generator.generate_next_token()
        end_s = time.perf_counter() - start
        tokens = [generator.get_sequence(i)[-new_tokens:].tolist() for i in range(len(prompts))]
        return Turn(Times(first_s, end_s), tokens)

    def _generator(self, num_requests: int, length: int, context: list[int]) -> Any:
        """One that has computed the context; without one, a new one: batches do not rewind."""
        if self._kept and context and self._kept[:2] == (context, length):
            self._kept[2].rewind_to(len(context))
            return self._kept[2]
        params = lib.GeneratorParams(self._model)
        params.set_search_options(
            batch_size=num_requests, max_length=length, min_length=length, do_sample=False
        )
        generator = lib.Generator(self._model, params)
        if context:
            generator.append_tokens(np.array(context, np.int32))
            self._kept = context, length, generator
        return generator


if __name__ == "__main__":
    serve(Session)
