"""What `octavo inspect --memory` prints, and how the options of memory are refused, without the compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main
from runtime import machine
from runtime.gpu import targets
from runtime.gpu.vendor import Unavailable
from tests.runtime import made
from tests.runtime.fake_device import raw_plan


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Of the targets cpu and cuda:sm_90; one KV group of 2 layers, k and v of 1 head of 8, f32."""
    files = made.default_files()
    raw = made.with_gpu(files)
    files[f"{made.FOLDER}/plan.json"] = json.dumps(raw_plan(1)).encode()
    raw["files"] = made.manifest(files)["files"]
    return made.write(tmp_path / "tiny.octavo", files, raw)


def octavo(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0), *capsys.readouterr()


def planned(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    code, out, err = octavo(capsys, "inspect", *args, "--memory", "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_parts_are_the_sum(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--kv-blocks", 9, "--swap-memory", "5KB", "--max-step-tokens", 20, "--max-requests", 3)
    found = planned(capsys, engine, "--target", "cpu", *options, "--length", 17, "--length", 256)
    assert found["weight_bytes"] == (engine / "weights/cpu.safetensors").stat().st_size
    assert found["arena_bytes"] == 64 * 32 + 32 * 16 + 256  # of 20 tokens and 3 requests
    assert found["logits_bytes"] == (3 + 128) * 97 * 4
    group = {"layers": 2, "window": None, "tail": False, "state": False, "block": 16}
    group["bytes_per_token"] = 2 * 2 * 1 * 8 * 4
    assert found["groups"] == [group | {"block_bytes": 2048, "blocks": 9, "bytes": 9 * 2048}]
    assert found["swap_blocks"] == 2 and found["swap_bytes"] == 4096
    parts = ("weight", "arena", "logits", "sampler", "inputs", "kv", "swap")
    assert found["total_bytes"] == sum(found[f"{name}_bytes"] for name in parts)
    assert found["concurrent"] == {"17": 3, "256": 0}  # 2 blocks each, of 9, and 16
    assert found["refusal"] is None and found["unknown"] == []


def test_the_table_is_aligned(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("inspect", engine, "--memory", "--target", "cpu", "--kv-memory", "18KiB", "--length", 33)
    code, out, _ = octavo(capsys, *args)
    parts, requests = out.split("\n\n")
    title, *rows = parts.splitlines()
    assert code == 0 and title == "memory of the host for the target cpu, in bytes"
    (cache,) = [row for row in rows if row.startswith("KV cache")]
    assert "2 layers, full, 128 bytes per token: 9 blocks of 16" in cache
    end = cache.index("18,432") + len("18,432")
    assert all(row[end - 1].isdigit() and row[end:][:1] in ("", " ") for row in rows)
    assert [row.split()[0] for row in rows] == [
        "weights", "arena", "logits", "sampler", "inputs", "KV", "in", "free", "left",
    ]  # fmt: skip
    assert requests == "requests at once, 64 at most\n  of 33 tokens  3\n"


def test_what_does_not_fit_is_shown_with_what_to_lower(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    args = ("inspect", engine, "--memory", "--target", "cpu", "--kv-memory", "4MiB")
    code, out, _ = octavo(capsys, *args, "--max-requests", 999)
    assert code == 0 and "\ndoes not fit: cpu: the host has 1.0 MiB of memory free" in out
    assert "Lower kv_memory" in out


def test_without_its_gpu_a_target_is_planned_and_says_what_is_unknown(
    engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(backend: str) -> None:
        raise Unavailable("there is no driver")

    monkeypatch.setattr(targets, "find_api", find)
    found = planned(capsys, engine, "--target", "cuda:sm_90", "--max-requests", 3)
    assert found["free_bytes"] is None and "there is no driver" in found["unknown"][0]
    assert found["groups"][0]["blocks"] == 3 * 16  # three requests of the whole context, 256 tokens
    assert found["weight_bytes"] == 2 * 256  # 192 and 20 bytes, each on a boundary of 256
    found = planned(capsys, engine, "--target", "cuda:sm_90", "--kv-memory", "10KiB", "--swap-memory", "4KiB")
    assert found["groups"][0]["blocks"] == 5 and found["swap_blocks"] == 2
    parts = ("weight", "arena", "logits", "sampler", "inputs", "kv")  # swap is the host's
    assert found["total_bytes"] == sum(found[f"{name}_bytes"] for name in parts)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspect", "--memory", "--kv-memory", "2 parsecs"], "'2 parsecs' is not a size"),
        (["inspect", "--memory", "--kv-memory", "0%"], "--kv-memory: it cannot be '0%'. "),
        (["inspect", "--memory", "--kv-memory", "1GiB", "--kv-blocks", "4"], "are both given"),
        (["inspect", "--memory", "--kv-blocks", "0"], "--kv-blocks: it cannot be 0. "),
        (["inspect", "--memory", "--kv-blocks", "many"], "--kv-blocks: 'many' is not a valid int. "),
        (["inspect", "--memory", "--swap-memory=-1"], "--swap-memory: '-1' is not a size. "),
        (["inspect", "--memory", "--max-requests", "0"], "--max-requests: it cannot be 0. "),
        (["inspect", "--memory", "--max-step-tokens", "1048577"], "--max-step-tokens: it cannot be 1048577"),
        (["inspect", "--memory", "--length", "257"], "--length: it cannot be 257. Use 1 to 256"),
        (["inspect", "--memory", "--target", "cuda:sm_80"], "no target 'cuda:sm_80'"),
        (["inspect", "--length", "25"], "--length: goes with --memory"),
        (["inspect", "--swap-memory", "1MiB"], "--swap-memory: goes with --memory"),
        (["generate", "hi", "--kv-memory", "half"], "such as '2GiB' or '40%'"),
        (["generate", "hi", "-n", "0"], "-n: it cannot be 0. "),
        (["generate", "hi", "--timeout", "0"], "--timeout: it cannot be 0.0. "),
        (["generate", "hi", "--timeout", "soon"], "--timeout: 'soon' is not a valid float. "),
        (["generate"], "prompt: it is missing: "),
        (["generate", "hi", "--kv-blocks", "1073741824", "--target", "cpu"], "32-bit slots"),
        (["bench", "--max-requests", "-3"], "--max-requests: it cannot be -3. "),
        (["bench", "--repeats", "0"], "--repeats: 0 is not in the range"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_and_exit_code_two(
    engine: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    command, *rest = args
    code, out, err = octavo(capsys, command, engine, *rest)
    assert code == 2 and out == "" and message in err
    assert err.startswith("octavo: ") and err.count("\n") == 1
