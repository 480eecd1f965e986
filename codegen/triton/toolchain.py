"""Triton's compiler and the tools that come with it, found without importing it.

A process that has imported Triton for compiling cannot interpret any more, so only `worker` imports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from codegen.errors import BuildError as BuildError

INSTALL = "Install it: pip install 'octavo[triton]'"
OWN_WHEEL = "Install Triton's own wheel, version 3.9"


def tool(name: str) -> Path:
    """One of NVIDIA's tools in Triton's package. Raises BuildError."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("Triton, which builds GPUs' kernels, is not installed", todo=INSTALL)
    path = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / name
    if not path.is_file():
        raise BuildError("Triton's package lacks it", where=str(path), todo=OWN_WHEEL)
    return path


@lru_cache
def ptxas(arch: str) -> Path:
    """The older of the two assemblers if it knows the architecture: more drivers load what it writes."""
    older = tool("ptxas")
    return older if f"'{arch}'" in _said(older, "--help") else tool("ptxas-blackwell")


def versions(backend: str, arch: str) -> dict[str, str]:
    """What made the binaries. Raises BuildError where Triton is not installed."""
    assembler = tool("ptxas") if backend != "cuda" else ptxas(arch)
    found = {"triton": _triton_version()}
    if backend == "cuda":
        found["ptxas"] = (re.findall(r"V(\d[\d.]*)", _said(assembler, "--version")) or ["unknown"])[-1]
    return found


def _triton_version() -> str:
    """Of whatever package it came in: PyTorch ships it under names of its own."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("triton")
    names = importlib.metadata.packages_distributions().get("triton")  # slow
    if not names:
        raise BuildError("the installed Triton has no version", todo=OWN_WHEEL)
    return importlib.metadata.version(names[0])


def environment(backend: str, arch: str, cache: Path) -> dict[str, str]:
    """Settings of Triton under which binaries depend on their source alone."""
    settings = {
        "TRITON_DISABLE_LINE_INFO": "1",  # else binaries name the folder that their source was in
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_HOME": str(cache),
    }
    if backend == "cuda":
        settings |= dict.fromkeys(("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"), str(ptxas(arch)))
    return settings


@lru_cache
def _said(path: Path, option: str) -> str:
    return subprocess.run([path, option], capture_output=True, text=True, check=False).stdout
