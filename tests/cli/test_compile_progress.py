"""What octavo compile says before it begins, as it runs and at DEBUG's levels, and what it estimates from."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from rich.console import Console

import compiler
from compiler.cli.errors import check_debug, debug_level
from compiler.cli.main import main
from compiler.cli.terminal import Bar, Terminal, rate
from compiler.rates import LEAST_BYTES, Rates, keep_rates, measured_rates, read_rates
from compiler.survey import survey
from tests.compiler import made
from tests.passes.test_page_kv import two_layers

COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && exit
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """octavo compile of a made checkpoint, by a compiler that writes a word: (exit code, stdout, stderr)."""
    monkeypatch.setattr("compiler.importers.load", made.made)
    (tmp_path / "cxx").write_text(COMPILER)
    (tmp_path / "cxx").chmod(0o755)
    checkpoint(tmp_path / "checkpoint")
    for name, value in {
        "CXX": tmp_path / "cxx",
        "OCTAVO_CACHE": tmp_path / "cache",
        "DEBUG": 0,
        "COLUMNS": 200,
    }.items():
        monkeypatch.setenv(name, str(value))

    def octavo(*args: str) -> tuple[int, str, str]:
        out = ["-o", str(tmp_path / "m.octavo"), "--isa", "neon"]  # which is not run here
        monkeypatch.setattr(sys.modules["codegen.cpp.build"], "_host_arch", lambda: "aarch64")
        with pytest.raises(SystemExit) as ended:
            main(["compile", str(tmp_path / "checkpoint"), *out, *args])
        return int(ended.value.code or 0), *capsys.readouterr()

    return octavo


def checkpoint(folder: Path) -> Path:
    """Two tensors, of 6 and of 35 elements."""
    folder.mkdir()
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((7, 5), np.float16)}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 77}}))
    return folder


def test_a_compile_says_first_what_it_takes_and_a_dry_run_no_more(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, said, _ = run("--dry-run", "--block", "32")
    assert code == 0 and not (tmp_path / "m.octavo").exists()
    assert [line.split()[0] for line in said.splitlines()] == ["reads", "writes", "for", "memory", "time"]
    code, _, shown = run("--block", "32")
    assert code == 0
    for index in (0, 2, 3):  # in the others the disk's room and the machine's load may have changed
        assert shown.splitlines()[index] == said.splitlines()[index]
    code, said, _ = run("--dry-run", "--json")
    found = json.loads(said)
    assert (found["format"], found["tensors"], found["weights"]) == ("huggingface", 2, 41)
    assert found["read_bytes"] == (tmp_path / "checkpoint/model.safetensors").stat().st_size
    assert (found["max_context"], found["targets"], found["dtype"]) == (77, {"cpu": ["neon"]}, "f32")
    assert found["replaces"].startswith("the artifact there")


def test_with_json_stdout_is_one_object_and_quiet_says_nothing(
    run: Callable[..., tuple[int, str, str]],
) -> None:
    code, said, shown = run("--json")
    found = json.loads(said)
    assert code == 0 and found["preflight"]["weights"] == 41 and found["seconds"]["import"] >= 0 and shown
    assert run("--quiet") == (0, "", "")
    code, said, shown = run("-q", "--json")
    assert (code, shown) == (0, "") and json.loads(said)["artifact"]


def test_a_second_compile_finds_its_kernels_and_gives_the_same_digest(
    run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    digests: list[str] = []
    for args, found in (((), None), ((), "2 of 2 kernels from the cache"), (("--no-cache",), None)):
        code, _, shown = run(*args)
        assert code == 0 and (found in shown if found else "cache" not in shown.replace("in the cache", ""))
        digests.append(json.loads((tmp_path / "m.octavo/manifest.json").read_text())["digest"])
    assert len(set(digests)) == 1


@pytest.mark.parametrize("level", range(6))
def test_debug_shows_more_at_each_level(
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: int,
) -> None:
    monkeypatch.setenv("DEBUG", str(level))
    code, said, shown = run()
    assert code == 0 and said.count("\n") == 1
    assert ("\npage_kv: " in shown and " changes, " in shown) == (level >= 1)
    assert (shown.count("graph @toy") == 1) == (level == 2)
    assert ("// after page_kv" in shown) == (level >= 3)
    assert ("octavo_forward(" in shown) == (level >= 4)
    Terminal().graph("cse", two_layers(), 0, ["an exp that is not shared"])  # type: ignore[list-item]
    assert ("cse missed: an exp that is not shared" in capsys.readouterr().err) == (level >= 5)


@pytest.mark.parametrize("text", ["6", "-1", "yes", "*", "²", "1.0"])
def test_what_is_no_level_of_debug_is_told(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEBUG", text)
    check_debug()
    assert debug_level() == 0 and capsys.readouterr().err.count("no level from 0 to 5") == 1
    for level in ("", "0", "5"):
        monkeypatch.setenv("DEBUG", level)
        check_debug()
    assert capsys.readouterr().err == ""


def test_a_limit_of_the_cache_that_is_no_size_is_refused(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE_LIMIT", "much")
    code, said, shown = run()
    assert (code, said, shown.count("\n")) == (2, "", 1) and "OCTAVO_CACHE_LIMIT" in shown


def test_a_terminal_shows_the_stage_the_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    bar = Bar(console)
    bar.start("19/22 pack cpu", "MB", since=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: 4.0)
    bar.advance(200_000_000, 600_000_000)
    bar.stop()
    assert "19/22 pack cpu" in written.getvalue() and "200/600 MB, 50 MB/s, 8 s left" in written.getvalue()
    quiet = Bar(Console(file=written, force_terminal=True, quiet=True))
    quiet.start("pack", "MB")
    assert not quiet.is_started


def test_rates_are_in_the_units_of_the_stage() -> None:
    assert rate(0, 6, 3.0, "kernels") == "0/6 kernels"
    assert rate(3, 6, 6.0, "kernels") == "3/6 kernels, 0.5 kernels/s, 6 s left"
    assert rate(1_000_000, 2_000_000, 0.5, "MB") == "1/2 MB, 2.0 MB/s"


def test_an_interrupt_that_was_swallowed_is_raised_at_the_next_stage() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Terminal(check=check).stage("pack")
    with pytest.raises(KeyboardInterrupt):
        Terminal(check=check).advance(1, 2)


def test_a_gguf_file_is_surveyed_by_its_header(tmp_path: Path) -> None:
    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word.encode())) + word.encode()

    fields = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("é"),
        text("scores") + struct.pack("<IIQ2f", 9, 6, 2, 1, 2),
        text("llama.context_length") + struct.pack("<II", 4, 1234),
        text("flag") + struct.pack("<IB", 7, 1),
    ]
    tensors = [
        text("t") + struct.pack("<I2QIQ", 2, 3, 4, 0, 0),
        text("u") + struct.pack("<IQIQ", 1, 9, 0, 64),
    ]
    whole = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join(fields + tensors)
    (tmp_path / "m.gguf").write_bytes(whole)
    found = survey(tmp_path / "m.gguf")
    assert (found.kind, found.counts, found.max_context, found.num_bytes) == (
        "gguf",
        [12, 9],
        1234,
        len(whole),
    )
    for cut in range(len(whole)):
        (tmp_path / "m.gguf").write_bytes(whole[:cut])
        assert survey(tmp_path / "m.gguf").kind == "unknown"
    huge = struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 2**60)
    (tmp_path / "m.gguf").write_bytes(huge + whole)
    assert survey(tmp_path / "m.gguf").kind == "unknown"


def test_what_cannot_be_read_is_unknown_and_left_to_the_import(tmp_path: Path) -> None:
    assert survey(tmp_path / "nowhere").kind == "unknown"
    folder = checkpoint(tmp_path / "m")
    (folder / "config.json").write_text("[" * 100_000)
    assert survey(folder).kind == "unknown"
    (folder / "config.json").write_text("{}")
    assert survey(folder, weights=False).kind == "shapes"
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    assert survey(folder).kind == "unknown"


MEASURED = Rates(10.0, 100, 1e-9, 2.0, {"huggingface, f32": 3e-9}, {"cpu": 0.5}, {"cpu": 7.0})


def test_an_estimate_is_what_such_a_compile_took_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "m")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    planned = compiler.preflight(folder, tmp_path / "out", isa=["v3"])
    assert planned.seconds_built is None and planned.seconds_cached is None and "not known" in str(planned)
    keep_rates(tmp_path / "cache", replace(MEASURED, build_s={}))
    assert compiler.preflight(folder, tmp_path / "out", isa=["v3"]).seconds_built is None
    keep_rates(tmp_path / "cache", MEASURED)
    planned = compiler.preflight(folder, tmp_path / "out", isa=["v3"])
    alone = 10 * (0.5 + 0.5 * 2 / 100) + planned.write_bytes * (3e-9 + 1e-9 / 2) + 2
    assert planned.seconds_cached == pytest.approx(alone + 2 * 0.5 / 2)
    assert planned.seconds_built == pytest.approx(alone + 2 * 7.0 / 2)
    assert compiler.preflight(folder, tmp_path / "out", isa=["v3"], cache=False).seconds_cached is None
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0, 0.0, 0.0))  # two cores for four
    busy = compiler.preflight(folder, tmp_path / "out", isa=["v3"])
    assert busy.seconds_cached is not None and busy.seconds_cached > 1.9 * (alone + 0.5)
    monkeypatch.setattr(os, "getloadavg", lambda: (16.0, 0.0, 0.0))
    busy = compiler.preflight(folder, tmp_path / "out", isa=["v3"])
    assert busy.seconds_built is None and "busy (load 16, cores 2)" in str(busy)


def test_a_quantised_compile_promises_neither_time_nor_memory(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    planned = compiler.preflight(folder, tmp_path / "out", isa=["v3"], quantize="int4", kv="int8")
    assert planned.json["quantized"] == "weights int4, kv int8" and "; weights int4, kv int8;" in str(planned)
    assert "at most" not in str(planned) and "not known where a model is quantised" in str(planned)
    plain = compiler.preflight(folder, tmp_path / "out", isa=["v3"], quantize="none", kv="bf16")
    assert plain.json["quantized"] is None and "at most" in str(plain)


def test_rates_blend_and_what_was_not_measured_stays(tmp_path: Path) -> None:
    keep_rates(tmp_path, MEASURED)
    keep_rates(tmp_path, Rates(import_s=20.0, import_tensors=100, build_s={"cuda:sm_90": 3.0}))
    found = read_rates(tmp_path)
    assert (found.import_s, found.hash_s, found.build_s) == (15.0, 1e-9, {"cpu": 7.0, "cuda:sm_90": 3.0})
    for damage in (
        "",
        "[]",
        '{"import_s": "long"}',
        '{"hash_s": -1}',
        '{"pack_s": {"a": null}}',
        "[" * 10**5,
    ):
        (tmp_path / "rates.json").write_text(damage)
        assert math.isnan(read_rates(tmp_path).import_s), damage
    keep_rates(tmp_path / "rates.json", MEASURED)  # no folder: nothing happens


def test_only_compiles_of_one_kind_are_measured_and_small_models_do_not_count() -> None:
    stages = {"import": 9.0, "cse": 1.0, "pack cpu": 4.0, "build cpu": 6.0, "hash": 2.0, "verify cpu": 1.0}
    found = measured_rates(stages, "gguf, f32", LEAST_BYTES, 50, {"cpu": (0, 6)})
    assert (found.import_s, found.import_tensors, found.verify_s) == (10.0, 50, 1.0)
    assert (found.pack_s, found.hash_s) == ({"gguf, f32": 4 / LEAST_BYTES}, 2 / LEAST_BYTES)
    assert (found.build_s, found.link_s) == ({"cpu": 1.0}, {})
    assert measured_rates(stages, "gguf, f32", LEAST_BYTES, 50, {"cpu": (2, 4)}).build_s == {}
    small = measured_rates(stages, "gguf, f32", 1000, 8, {"cpu": (6, 0)})
    assert math.isnan(small.import_s) and (small.link_s, small.pack_s) == ({"cpu": 1.0}, {})
