"""Throughput of an engine beside the machine's memory-bandwidth bound, measured in alternation.

usage: against_bounds.py ENGINE [--threads N] [--repeats 3] [--prompt-tokens 512] [--new-tokens 64]

A decode step of one request reads every weight once, so that bandwidth / bytes of weights bounds its tokens
per second. Bandwidth is that of reading an array much larger than the caches with as many threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BUFFER_BYTES = 512 << 20


def read_bandwidth(num_threads: int, array: np.ndarray) -> float:
    """Bytes per second of reading `array` once, best of three."""
    parts = np.array_split(array, num_threads)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(3):
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, array.nbytes / (time.perf_counter() - start))
    return best


def weight_bytes(engine: Path) -> int:
    manifest = json.loads((engine / "manifest.json").read_text())
    return manifest["files"][manifest["targets"]["cpu"]["weights"]]["bytes"]


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One run of `octavo bench` in a process of its own, so that its peak memory is its own too."""
    command = [
        sys.executable,
        "-m",
        "compiler.cli.main",
        "bench",
        str(args.engine),
        "--json",
        "--repeats",
        "1",
        "--threads",
        str(args.threads),
        "--prompt-tokens",
        str(args.prompt_tokens),
        "--new-tokens",
        str(args.new_tokens),
    ]
    return json.loads(subprocess.check_output(command, text=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of an engine beside the memory-bandwidth bound")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()

    array = np.ones(BUFFER_BYTES // 4, np.float32)
    bandwidths, runs = [], []
    for _ in range(args.repeats):
        bandwidths.append(read_bandwidth(args.threads, array))
        runs.append(measure(args))
    bandwidth = statistics.median(bandwidths)
    decode = statistics.median(run["decode_tokens_per_s"] for run in runs)
    prefill = statistics.median(run["prefill_tokens_per_s"] for run in runs)
    bound = bandwidth / weight_bytes(args.engine)
    low, high = min(bandwidths) / 1e9, max(bandwidths) / 1e9
    print(f"read bandwidth   {bandwidth / 1e9:8.1f} GB/s ({low:.1f} to {high:.1f})")
    print(f"weights          {weight_bytes(args.engine) / 1e6:8.1f} MB")
    print(f"decode bound     {bound:8.1f} tok/s, one request")
    print(f"decode           {decode:8.1f} tok/s, {decode / bound:.0%} of the bound")
    print(f"prefill          {prefill:8.1f} tok/s, {args.prompt_tokens} tokens")


if __name__ == "__main__":
    main()
