"""A compile in a process of its own: how much memory and CPU time it takes beyond importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 1 << 20

COMPILE = """
    import json, sys
    import torch, transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

    import compiler

    lines = open("/proc/self/status").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("RssAnon")), flush=True)
    source, out, dtype, *isa = sys.argv[1:]
    compiler.compile(source, out, dtype=dtype, isa=isa or None)
"""


@dataclass(frozen=True)
class Measured:
    """peak_bytes: of anonymous memory, above what the imports had taken. cpu_s: with all child processes."""

    peak_bytes: int
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.peak_bytes / 1e6:.0f} MB above importing torch, {self.cpu_s:.0f} s of CPU"


def compile_measured(source: Path, out: Path, dtype: str, isa: Sequence[str] = ()) -> Measured:
    """Compile for ISA levels, or for all. The peak is sampled, 200 times a second."""
    command = [sys.executable, "-c", textwrap.dedent(COMPILE), str(source), str(out), dtype, *isa]
    env = os.environ | {"OMP_NUM_THREADS": "2"}
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    base = int(child.stdout.readline() or 0) << 10
    peak = 0
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, _anonymous_bytes(child.pid))
        time.sleep(0.005)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stdout.close()
    assert child.returncode == 0 and base > 0 and peak > 0
    return Measured(peak - base, usage.ru_utime + usage.ru_stime)


def _anonymous_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)
