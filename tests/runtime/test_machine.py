"""Reading this machine's features and limits, and planning KV blocks from them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from runtime import ResourceError, machine


def test_features_are_read_in_one_spelling():
    text = "processor: 0\nflags\t\t: fpu sse4_1 avx512_vnni avx512f\n\nprocessor: 1\nflags: fpu\n"
    assert machine.cpu_features(text) == {"fpu", "sse41", "avx512vnni", "avx512f"}
    assert machine.cpu_features("Features : asimd dotprod\n") == {"asimd", "dotprod"}
    assert machine.spelling("sse4.1") == machine.spelling("SSE4_1")
    assert machine.cpu_features()


def test_threads_follow_affinity():
    cores = sorted(os.sched_getaffinity(0))
    assert 1 <= machine.default_threads() <= len(cores)
    code = f"import os; os.sched_setaffinity(0, {{{cores[0]}}})\n"
    code += "from runtime import machine; print(machine.default_threads())"
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"1"


@pytest.mark.parametrize(("quotas", "threads"), [([1.5], 1), ([0.5], 1), ([100.0], None), ([64, 1.0], 1)])
def test_threads_follow_quotas(monkeypatch, quotas, threads):
    monkeypatch.setattr(machine, "_cpu_quotas", lambda: iter(quotas))
    assert machine.default_threads() == (threads or len(os.sched_getaffinity(0)))


def test_free_memory_is_what_every_cgroup_leaves_but_for_files(monkeypatch, tmp_path):
    """2 GiB of limit, 1.5 GiB used, of which 1.25 GiB are pages of files: 1.75 GiB can be had."""
    group, parent = tmp_path / "parent" / "group", tmp_path / "parent"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{2 << 30}\n")
    (group / "memory.current").write_text(f"{3 << 29}\n")
    stat = f"anon 1000\nfile {3 << 29}\nactive_file {1 << 30}\ninactive_file {1 << 28}\nslab 5\n"
    (group / "memory.stat").write_text(stat)
    (parent / "memory.max").write_text("max\n")
    monkeypatch.setattr(machine, "_cgroup_dirs", lambda: iter([]))
    here = machine.free_memory()
    monkeypatch.setattr(machine, "_cgroup_dirs", lambda: iter([group, parent]))
    assert abs(machine.free_memory() - min(here, 7 << 28)) < 1 << 28
    (group / "memory.max").write_text("1000\n")
    (group / "memory.stat").write_text("")
    assert machine.free_memory() == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("1.5 GB", 1_500_000_000), ("64 mib", 64 << 20), ("100", 100), (77, 77)],
)
def test_sizes(text, size):
    assert machine.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "1 parsec", "1e3", "9" * 400, None, True, -5, 1.5])
def test_what_is_no_size(text):
    with pytest.raises(ResourceError, match="not a size"):
        machine.parse_bytes(text)


def test_importing_the_runtime_is_light():
    heavy = ["torch", "transformers", "sympy", "tokenizers", "jinja2", "asyncio", "concurrent", "ir"]
    code = f"import sys, runtime; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"[]"
