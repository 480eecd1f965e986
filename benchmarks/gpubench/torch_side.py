"""torch's side: linears by cuBLAS, attention by its flash kernels, models by transformers and torch.compile.

All of it runs on a CPU too, where it is only tried out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from gpubench.octavo import median_s
from gpubench.workloads import Workload

COPIES = 8  # of weights and caches, so that a kernel does not find its own in the L2


class Torch:
    """device: "cuda", also for AMD's GPUs, or "cpu"."""

    def __init__(self, device: str, repeats: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.repeats, self.dtype = device, repeats, dtype

    def kernel_us(self, op: str, operations: int, workload: Workload, config: Path) -> float | None:
        """Of one call of what does the same as a kernel of ours, or None where there is nothing alike."""
        with torch.inference_mode():
            if found := re.fullmatch(r"linear (\d+) -> (\d+)( gated)?", op):
                inputs, outputs = int(found[1]), int(found[2])
                return self._linear_us(inputs, outputs, operations // (2 * inputs * outputs))
            if op == "paged_attention":
                return self._attention_us(AutoConfig.from_pretrained(config), workload)
        return None

    def step_s(self, config: Path, workload: Workload) -> float:
        """A forward with a static cache and the choice of tokens, compiled into CUDA graphs."""
        torch._dynamo.reset()
        settings = AutoConfig.from_pretrained(config)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(settings, dtype=self.dtype, attn_implementation="sdpa")
        model.eval()
        with torch.inference_mode():
            return self._step_s(model, settings, workload)

    # --- kernels

    def _linear_us(self, inputs: int, outputs: int, rows: int) -> float:
        x = self._random(rows, inputs)
        weights = [self._random(outputs, inputs) for _ in range(COPIES)]
        return self._mean_us([lambda w=w: F.linear(x, w) for w in weights])

    def _attention_us(self, settings: Any, workload: Workload) -> float:
        heads, kv_heads = settings.num_attention_heads, settings.num_key_value_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        q = self._random(workload.requests, heads, workload.tokens, size)
        caches = [
            tuple(self._random(workload.requests, kv_heads, workload.length, size) for _ in range(2))
            for _ in range(COPIES)
        ]
        causal = workload.tokens > 1  # and nothing is cached
        return self._mean_us([
            lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            for k, v in caches
        ])  # fmt: skip

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype) * 0.02

    def _mean_us(self, calls: Sequence[Callable[[], object]]) -> float:
        """Of one of the calls, which are recorded as one CUDA graph."""

        def all_of_them() -> None:
            for call in calls:
                call()

        work = self._recorded(all_of_them)
        return median_s(work, self._wait, self.repeats) / len(calls) * 1e6

    def _recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.device == "cpu":
            return work
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    # --- models

    def _step_s(self, model: Any, settings: Any, workload: Workload) -> float:
        cache: Any = StaticCache(config=settings, max_cache_len=workload.length)
        shape = (workload.requests, workload.tokens)
        ids = torch.randint(0, settings.vocab_size, shape, device=self.device)
        positions = torch.arange(workload.cached, workload.length, device=self.device).expand(shape)

        def step(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            for layer in cache.layers:
                layer.cumulative_length.fill_(workload.cached)
            out = model(input_ids=ids, cache=cache, position_ids=positions, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1)

        step(ids, positions)  # makes the cache, which must not happen in what is compiled
        compiled = step if self.device == "cpu" else torch.compile(step, mode="reduce-overhead")
        for _ in range(3):  # compiles, and records
            compiled(ids, positions)
        return median_s(lambda: compiled(ids, positions).tolist(), self._wait, self.repeats)
