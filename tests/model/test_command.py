"""The octavo command on the demo model: generate, inspect and bench."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCH_KEYS = {
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "output_tokens_per_s",
    "first_token_s",
    "load_s",
    "peak_rss_bytes",
}


def octavo(*args: str, stdin: str = "") -> str:
    command = [sys.executable, "-m", "compiler.cli.main", *args]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_prints_the_text_that_transformers_gives(
    demo_f32: Path, greedy_cases: list[dict[str, Any]]
) -> None:
    case = greedy_cases[0]
    expected = case["text"].removesuffix("<|im_end|>") + "\n"
    assert octavo("generate", str(demo_f32), case["prompt"], "--max-new-tokens", "64") == expected
    assert octavo("generate", str(demo_f32), "-", "--max-new-tokens", "64", stdin=case["prompt"]) == expected


def test_generate_chats(demo_f32: Path, greedy_cases: list[dict[str, Any]]) -> None:
    case = next(c for c in greedy_cases if c["kind"] == "chat" and len(c["new_ids"]) < 64)
    found = octavo("generate", str(demo_f32), "--chat", case["prompt"])
    assert found == case["text"].removesuffix("<|im_end|>") + "\n"


def test_generate_gives_json_with_logprobs(demo_f32: Path, greedy_cases: list[dict[str, Any]]) -> None:
    case = greedy_cases[0]
    args = ("generate", str(demo_f32), case["prompt"], "--json", "--logprobs", "2", "--max-new-tokens", "5")
    found = json.loads(octavo(*args))
    assert found["token_ids"] == case["new_ids"][:5]
    assert found["finish_reason"] == "length"
    for entry, token, margin in zip(found["logprobs"], case["new_ids"], case["margins"], strict=False):
        (best, first), (_, second) = entry["top"]
        assert entry["token_id"] == best == token
        assert (
            abs(first - second - margin) < 2e-3
        )  # the reference's margin is between logits: the same difference


def test_generate_repeats_with_a_seed(demo_f32: Path) -> None:
    args = ("generate", str(demo_f32), "Once upon a time", "--temperature", "1", "--max-new-tokens", "24")
    assert octavo(*args, "--seed", "5") == octavo(*args, "--seed", "5") != octavo(*args, "--seed", "6")


def test_generate_samples_and_ends_in_time(demo_f32: Path) -> None:
    asked = ("generate", str(demo_f32), "Once upon a time", "--temperature", "1", "--seed", "5")
    options = ("--max-new-tokens", "3", "--kv-memory", "32MiB", "--max-requests", "2")
    samples = json.loads(octavo(*asked, *options, "-n", "2", "--json"))["samples"]
    assert [s["sample_index"] for s in samples] == [0, 1] and samples[0]["text"] != samples[1]["text"]
    text = "".join(f"--- sample {i} (length)\n{s['text']}\n" for i, s in enumerate(samples))
    assert octavo(*asked, *options, "-n", "2") == text
    late = json.loads(octavo(*asked, "--max-new-tokens", "8000", "--timeout", "0.5", "--json"))
    assert late["finish_reason"] == "timeout" and len(late["token_ids"]) < 7000


def test_bench_gives_its_keys(demo_f32: Path) -> None:
    args = ("--prompt-tokens", "32", "--new-tokens", "8", "--requests", "2", "--repeats", "1")
    found = json.loads(octavo("bench", str(demo_f32), *args, "--json"))
    assert BENCH_KEYS <= set(found)
    assert all(found[key] > 0 for key in BENCH_KEYS)
    weights = 134.5e6 * 4
    assert weights < found["peak_rss_bytes"] < weights + 1.5e9


def test_inspect_counts_bytes(demo_f32: Path) -> None:
    found = json.loads(octavo("inspect", str(demo_f32), "--json"))
    assert found["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    on_disk = {
        p.relative_to(demo_f32).as_posix(): p.stat().st_size for p in demo_f32.rglob("*") if p.is_file()
    }
    del on_disk["manifest.json"]
    assert found["bytes"]["files"] == on_disk
    assert found["bytes"]["total"] == sum(on_disk.values())


def test_inspect_prints_a_graph_that_opt_reads(demo_f32: Path) -> None:
    text = octavo("inspect", str(demo_f32), "--ir", "graph")
    assert text.startswith("graph @") and "paged_attention" in text
    assert octavo("opt", "-", stdin=text) == text
