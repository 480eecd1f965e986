"""The CPU seconds that importing and lowering a large model take, without weights, beside their limits.

python benchmarks/lowering.py [--layers N]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

LIMITS_S = {"import": 20.0, "passes": 8.0}  # of 32 layers
MAX_OPS = 24  # of a layer, those that reshape and those of weights too
LLAMA_8B = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)


def measure(num_layers: int) -> tuple[dict[str, float], float]:
    """CPU seconds of the import (with loading torch and transformers) and of the passes; ops of a layer."""
    start = time.process_time()
    from compiler.importers import load
    from compiler.pipeline import pipeline, run_pipeline

    with tempfile.TemporaryDirectory() as folder:
        config = LLAMA_8B | {"num_hidden_layers": num_layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        graph = load(Path(folder), weights=False).graph
    imported = time.process_time()
    ops = len(run_pipeline(graph, pipeline()).ops)
    return {"import": imported - start, "passes": time.process_time() - imported}, ops / num_layers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    seconds, ops = measure(parser.parse_args().layers)
    for name, value in seconds.items():
        print(f"{name}: {value:.1f} s of CPU (limit {LIMITS_S[name]:g})")
    print(f"ops of a layer: {ops:.1f} (limit {MAX_OPS})")
    return any(value > LIMITS_S[name] for name, value in seconds.items()) or ops > MAX_OPS


if __name__ == "__main__":
    sys.exit(main())
