"""llama.cpp through its C API, as llama-cpp-python binds it; greedy by the largest logit."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from sidebyside.worker import Turn, serve
from sidebyside.workloads import Times

BATCH, MICRO_BATCH = 2048, 512  # its defaults


class Session:
    def __init__(self, model: Path, num_threads: int, dtype: str) -> None:
        self._silence = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{model}: llama.cpp cannot load it")
        self._num_threads = num_threads
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._caches: dict[tuple[int, int], Cache] = {}
        system = lib.llama_print_system_info().decode()
        self.facts: dict[str, Any] = {"llama-cpp-python": lib.__version__, "system": system}

    def run(self, context: list[int], prompts: list[list[int]], new_tokens: int) -> Turn:
        cache = self._cache(len(prompts), len(context) + max(map(len, prompts)) + new_tokens)
        cache.keep(context)
        start = time.perf_counter()
        last = cache.prefill(prompts, len(context))
        first_s = time.perf_counter() - start
        tokens = [[token] for token in last]
        for position in range(new_tokens - 1):
            last = cache.decode(last, [len(context) + len(prompt) + position for prompt in prompts])
            for mine, token in zip(tokens, last, strict=True):
                mine.append(token)
        return Turn(Times(first_s, time.perf_counter() - start), tokens)

    def _cache(self, num_sequences: int, num_tokens: int) -> Cache:
        """One for each shape of workload, made once so that no turn pays for its memory."""
        room = -(-num_tokens // 256) * 256
        if (num_sequences, room) not in self._caches:
            params = lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.kv_unified = room * num_sequences, num_sequences, False
            params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
            params.n_threads = params.n_threads_batch = self._num_threads
            handle = lib.llama_init_from_model(self._model, params)
            self._caches[num_sequences, room] = Cache(handle, num_sequences, self._vocab_size)
        return self._caches[num_sequences, room]


class Cache:
    """A llama_context: the keys and values of some sequences, and steps over them."""

    def __init__(self, handle: Any, num_sequences: int, vocab_size: int) -> None:
        self._handle, self._memory = handle, lib.llama_get_memory(handle)
        self._num_sequences, self._vocab_size = num_sequences, vocab_size
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._context: list[int] = []

    def keep(self, context: list[int]) -> None:
        """Drop everything after the context, which is computed if it is not there."""
        if context == self._context:
            for sequence in range(self._num_sequences):
                lib.llama_memory_seq_rm(self._memory, sequence, len(context), -1)
            return
        lib.llama_memory_clear(self._memory, True)
        for sequence in range(self._num_sequences):
            for start in range(0, len(context), MICRO_BATCH):
                chunk = context[start : start + MICRO_BATCH]
                self._step([(sequence, start + i, token, False) for i, token in enumerate(chunk)])
        self._context = context

    def prefill(self, prompts: list[list[int]], position: int) -> list[int]:
        """As many whole prompts at once as a batch holds; the first new token of each."""
        at_once = max(1, BATCH // max(map(len, prompts)))
        last: list[int] = []
        for start in range(0, len(prompts), at_once):
            last += self._step(
                [
                    (sequence, position + i, token, i == len(prompt) - 1)
                    for sequence, prompt in enumerate(prompts[start : start + at_once], start)
                    for i, token in enumerate(prompt)
                ]
            )
        return last

    def decode(self, tokens: list[int], positions: list[int]) -> list[int]:
        rows = zip(range(len(tokens)), positions, tokens, strict=True)
        return self._step([(*row, True) for row in rows])

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One llama_decode of (sequence, position, token, wanted) rows; the next token of each wanted one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        code = lib.llama_decode(self._handle, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code} for {len(rows)} tokens")
        return [self._next(i) for i, row in enumerate(rows) if row[3]]

    def _next(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self._handle, row)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(Session)
