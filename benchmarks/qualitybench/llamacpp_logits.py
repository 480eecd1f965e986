"""Every logit of a GGUF file by llama.cpp. Run by an environment that has llama-cpp-python, not imported.

usage: llamacpp_logits.py MODEL IDS.npy OUT.npy THREADS; keys and values are float32.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp as lib
import numpy as np

GGML_TYPE_F32 = 0
STEP_TOKENS = 256


def main() -> None:
    model, ids, out, threads = sys.argv[1:]
    silence = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silence, ctypes.c_void_p(0))
    lib.llama_backend_init()
    loaded = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
    if not loaded:
        sys.exit(f"{model}: llama.cpp cannot load it")
    windows = np.load(ids)  # [W, S]
    context = _context(loaded, windows.shape[1], int(threads))
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
    found = np.lib.format.open_memmap(out, "w+", np.float32, (*windows.shape, vocab_size))
    for window, logits in zip(windows, found, strict=True):
        _run(context, window, logits)
    found.flush()


def _context(model: Any, length: int, threads: int) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = -(-length // 256) * 256, STEP_TOKENS, STEP_TOKENS
    params.n_threads = params.n_threads_batch = threads
    params.type_k = params.type_v = GGML_TYPE_F32
    return lib.llama_init_from_model(model, params)


def _run(context: Any, ids: Any, out: Any) -> None:
    lib.llama_memory_clear(lib.llama_get_memory(context), True)
    batch = lib.llama_batch_init(STEP_TOKENS, 0, 1)
    for start in range(0, len(ids), STEP_TOKENS):
        chunk = ids[start : start + STEP_TOKENS]
        batch.n_tokens = len(chunk)
        for i, token in enumerate(chunk):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), start + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if code := lib.llama_decode(context, batch):
            sys.exit(f"llama_decode returned {code}")
        for i in range(len(chunk)):
            out[start + i] = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (out.shape[1],))
    lib.llama_batch_free(batch)


if __name__ == "__main__":
    main()
