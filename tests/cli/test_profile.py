"""`octavo profile` and the shares of `octavo bench`, on a tiny model whose counts are done by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compiler
from compiler.cli.bench import Times
from compiler.cli.drafts import Counts, speedup
from tests.model import tiny

ROOT = Path(__file__).parents[2]
HIDDEN, INNER, HEADS, HEAD, LAYERS = 96, 112, 3, 32, 2  # tiny's "llama"; one key/value head, embeddings tied
PROMPT, CONTEXT = 40, 20
QKV, REST = (HEADS + 2) * HEAD * HIDDEN, HEADS * HEAD * HIDDEN + 3 * INNER * HIDDEN  # weights of a layer
KV_BYTES = LAYERS * 2 * HEAD * 4  # of a token
COMMON = {"time_s", "idle_s", "weight_bytes", "kv_bytes", "activation_bytes", "operations", "bound", "share"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    source = tiny.save("llama", folder / "checkpoint")
    return compiler.compile(source, folder / "m.octavo", max_context=tiny.CONTEXT, isa=tiny.ISA)


def octavo(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compiler.cli.main", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def profiled(engine: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the JSON, the trace)."""
    trace = engine.parent / "trace.json"
    sizes = ("--prompt-tokens", PROMPT, "--context-tokens", CONTEXT, "--requests", 3)
    done = octavo("profile", engine, *sizes, "--threads", 2, "--repeats", 2, "--json", "--trace", trace)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), json.loads(trace.read_text())


def packed_bytes(engine: Path) -> int:
    """Bytes of all packed arrays, from the file's own header."""
    raw = (engine / "weights" / "cpu.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    spans = [entry["data_offsets"] for name, entry in header.items() if not name.startswith("filler.")]
    return sum(end - begin for begin, end in spans)


def operations(tokens: int, rows: int, pairs: int) -> int:
    """After the last layer's attention only the rows go on."""
    layers = LAYERS * (tokens * QKV + pairs * HEADS * 2 * HEAD) + (LAYERS - 1) * tokens * REST
    return 2 * (layers + rows * (REST + tiny.VOCAB * HIDDEN))


def test_profile_counts_as_by_hand(engine: Path, profiled: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found, cached = profiled[0], CONTEXT + PROMPT
    prefill, decode = found["prefill"], found["decode"]
    assert (prefill["tokens"], prefill["requests"], prefill["cached_tokens"]) == (3 * PROMPT, 3, CONTEXT)
    assert (decode["tokens"], decode["requests"], decode["cached_tokens"]) == (3, 3, cached)
    pairs = 3 * (CONTEXT * PROMPT + PROMPT * (PROMPT + 1) // 2)
    assert prefill["operations"] == operations(3 * PROMPT, 3, pairs)
    assert decode["operations"] == operations(3, 3, 3 * (cached + 1))
    assert prefill["kv_bytes"] == 3 * (PROMPT + cached) * KV_BYTES  # written, and read
    assert decode["kv_bytes"] == 3 * (1 + cached + 1) * KV_BYTES
    embedding_row = HIDDEN * 4
    assert decode["weight_bytes"] == packed_bytes(engine) + 3 * embedding_row
    assert prefill["weight_bytes"] == packed_bytes(engine) + 3 * PROMPT * embedding_row


def test_profile_adds_up(profiled: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found = profiled[0]
    assert found["isa"] == "v3" and found["threads"] == 2 and found["limits"]["bf16_ops_per_s"] == 0
    for step in (found["prefill"], found["decode"]):
        assert COMMON | {"bandwidth_share", "peak_share"} <= set(step)
        for part in (step["groups"], step["kernels"]):
            assert all(set(each) >= COMMON | {"label"} for each in part)
            for name in ("weight_bytes", "kv_bytes", "activation_bytes", "operations"):
                assert sum(each[name] for each in part) == step[name]
        assert all(0 <= k["idle_s"] <= k["time_s"] for k in step["kernels"])
        assert sum(group["kernels"] for group in step["groups"]) == len(step["kernels"])
        num_bytes = step["weight_bytes"] + step["kv_bytes"]
        share = num_bytes / found["limits"]["read_bytes_per_s"] / step["time_s"]
        assert step["bandwidth_share"] == pytest.approx(share)
        share = step["operations"] / found["limits"]["f32_ops_per_s"] / step["time_s"]
        assert step["peak_share"] == pytest.approx(share)
    locs = {kernel["loc"] for kernel in found["decode"]["kernels"] if kernel["label"] == "paged_attention"}
    assert locs == {"model.layers.0.self_attn", "model.layers.1.self_attn"}


def test_the_trace_nests(profiled: tuple[dict[str, Any], dict[str, Any]]) -> None:
    found, events = profiled[0], profiled[1]["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"prefill step", "decode step", "thread 0", "thread 1"}
    for pid, name in enumerate(("prefill", "decode")):
        for tid in (0, 1):
            lane = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
            step, *rest = lane
            assert step["name"] == name and step["ts"] == 0
            kernels = [e for e in rest if e["name"] != "wait"]
            assert [e["args"]["number"] for e in kernels] == list(range(len(found[name]["kernels"])))
            assert all(inside(e, step) for e in kernels)
            assert all(ends(a) == pytest.approx(b["ts"]) for a, b in zip(kernels, kernels[1:], strict=False))
            waits = [e for e in rest if e["name"] == "wait"]
            assert waits and all(any(inside(w, k) for k in kernels) for w in waits)


def ends(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    rounding = 1e-6
    return outer["ts"] - rounding <= inner["ts"] and ends(inner) <= ends(outer) + rounding


def test_profile_prints_groups_or_every_kernel(engine: Path) -> None:
    sizes = ("--prompt-tokens", 8, "--repeats", 1)
    groups = octavo("profile", engine, *sizes).stdout
    assert "linear 96 -> 224 gated x 2" in groups and "of the bandwidth bound" in groups
    every = octavo("profile", engine, *sizes, "--kernels").stdout
    assert every.count("paged_attention") == 2 * LAYERS and "layers.1.self_attn" in every


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt-tokens", 513), "--prompt-tokens 513: a step has at most 512 tokens"),
        (("--prompt-tokens", 100, "--context-tokens", 28), "with the prompt and a new token they are 129"),
        (("--prompt-tokens", 8, "--isa", "v9"), "no kernel"),
    ],
)
def test_profile_refuses_what_does_not_fit(engine: Path, args: tuple[object, ...], message: str) -> None:
    done = octavo("profile", engine, *args)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_bench_holds_drafts_beside_none(engine: Path) -> None:
    """The model as its own drafter, which may not pay at all: but what it drafts is right."""
    args = ("--prompt-tokens", 8, "--new-tokens", 40, "--repeats", 2, "--threads", 1)
    done = octavo("bench", engine, *args, "--draft", engine, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["drafted_tokens"] == found["accepted_tokens"] and found["draft_failures"] == 0
    assert set(found["acceptance_by_position"]) <= {1.0} and found["acceptance"] in (1.0, None)
    assert found["speedup_least"] <= found["speedup"] <= found["speedup_most"]
    assert "bandwidth_share" not in found and found["draft"] == str(engine)


def test_drafts_are_counted_since_the_warm_up() -> None:
    before = Counts(((4, 3), (4, 1)), verify_steps=4, draft_s=0.5, failures=1)
    after = Counts(((10, 6), (8, 2), (3, 2)), verify_steps=10, draft_s=0.75, failures=1)
    found = after.since(before).figures()
    assert (found["drafted_tokens"], found["accepted_tokens"]) == (6 + 4 + 3, 3 + 1 + 2)
    assert found["acceptance"] == 6 / 13 and found["acceptance_by_position"] == [3 / 6, 1 / 4, 2 / 3]
    assert (found["verify_steps"], found["draft_s"], found["draft_failures"]) == (6, 0.25, 0)
    assert after.since(after).figures()["acceptance"] is None


def test_a_speedup_is_the_median_of_pairs() -> None:
    plain = [Times([[1.0, 3.0]]), Times([[1.0, 5.0]]), Times([[0.5, 1.5], [0.0, 1.0]])]
    drafted = [Times([[2.0, 3.0]]), Times([[1.0, 2.0]]), Times([[0.5, 1.0], [0.0, 2.5]])]
    assert speedup(plain, drafted) == {"speedup": 2.0, "speedup_least": 0.5, "speedup_most": 4.0}


def test_bench_refuses_a_drafter_that_is_none(engine: Path) -> None:
    done = octavo("bench", engine, "--draft", "nonesuch")
    assert done.returncode == 2 and "--draft: it cannot be 'nonesuch'" in done.stderr


def test_bench_gives_the_shares_of_its_bounds(engine: Path) -> None:
    new = 9
    args = ("--prompt-tokens", PROMPT, "--new-tokens", new, "--repeats", 1, "--threads", 1)
    found = json.loads(octavo("bench", engine, *args, "--json").stdout)
    middle = PROMPT + (new + 1) // 2
    step_bytes = packed_bytes(engine) + HIDDEN * 4 + (middle + 1) * KV_BYTES
    rate = found["decode_tokens_per_s"] * step_bytes
    assert found["bandwidth_share"] == pytest.approx(rate / found["read_bytes_per_s"])
    per_token = operations(PROMPT, 1, PROMPT * (PROMPT + 1) // 2) / PROMPT
    rate = found["prefill_tokens_per_s"] * per_token
    assert found["peak_share"] == pytest.approx(rate / found["f32_ops_per_s"])
