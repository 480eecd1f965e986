"""OpenVINO GenAI's continuous batching pipeline, which serves its other pipelines on the CPU too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as lib

from sidebyside.worker import PrefixCachingSession, Turn, serve
from sidebyside.workloads import Times

CACHE_GB = 2


class Session(PrefixCachingSession):
    def __init__(self, model: Path, num_threads: int, dtype: str) -> None:
        scheduler = lib.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, True
        scheduler.max_num_batched_tokens = 2048
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": num_threads}
        if dtype == "f32":  # else it takes bf16 where the CPU has it
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipe = lib.ContinuousBatchingPipeline(
            str(model), scheduler_config=scheduler, device="CPU", properties=properties
        )
        super().__init__()
        self._submitted = 0
        self.facts: dict[str, Any] = {"openvino-genai": lib.__version__, "openvino": openvino.__version__}

    def complete(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        config = lib.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False
        )
        inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        first_s = 0.0
        start = time.perf_counter()
        handles = [self._pipe.add_request(self._submitted + i, ids, config) for i, ids in enumerate(inputs)]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for mine, handle in zip(tokens, handles, strict=True):
                if handle.can_read():
                    mine += [i for output in handle.read().values() for i in output.generated_ids]
            if not first_s and all(tokens):
                first_s = time.perf_counter() - start
        self._submitted += len(prompts)
        return Turn(Times(first_s, time.perf_counter() - start), tokens)


if __name__ == "__main__":
    serve(Session)
