"""Building shared libraries, one per ISA level, with the host's C++ compiler, or zig's if there is none."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[int, int], None]


class BuildError(RuntimeError):
    """The compiler is missing or refused the source; the message shows what it said."""


@dataclass(frozen=True)
class Level:
    """What a library may assume of the CPU. features: as the kernel names them; flags: for the compiler."""

    name: str
    arch: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


_V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

LEVELS: tuple[Level, ...] = (  # in order of preference
    Level("v4-vnni-bf16", "x86_64", (*_V4, "avx512_vnni", "avx512_bf16"),
          ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")),
    Level("v4-vnni", "x86_64", (*_V4, "avx512_vnni"), ("-march=x86-64-v4", "-mavx512vnni")),
    Level("v4", "x86_64", _V4, ("-march=x86-64-v4",)),
    Level("v3", "x86_64", _V3, ("-march=x86-64-v3",)),
    Level("baseline", "x86_64", (), ("-march=x86-64",)),
    Level("neon", "aarch64", (), ("-march=armv8-a",)),
)  # fmt: skip

FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread",
    "-fvisibility=hidden", "-static-libstdc++", "-static-libgcc",
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A built library, as the manifest lists it; file names are relative to the directory it was built in."""

    isa: str
    arch: str
    features: tuple[str, ...]
    file: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]
    glibc: str


def find_level(name: str) -> Level:
    """Raises BuildError with the names there are."""
    for level in LEVELS:
        if level.name == name:
            return level
    raise BuildError(f"there is no ISA level {name!r}. There are {', '.join(level.name for level in LEVELS)}")


def default_levels(*, bf16: bool) -> tuple[str, ...]:
    """Those of this machine's architecture at which kernels differ. bf16: whether linears multiply bf16.

    Only these use BF16 instructions, and nothing uses VNNI alone.
    """
    if _host_arch() != "x86_64":
        return ("neon",)
    return ("v4-vnni-bf16", "v4", "v3", "baseline") if bf16 else ("v4", "v3", "baseline")


def compiler_command(arch: str) -> tuple[list[str], bool]:
    """(command, whether it is zig's): $CXX, c++, g++ or clang++ for this machine's architecture, else zig.

    Raises BuildError saying what to install.
    """
    native = arch == _host_arch()
    if native:
        for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
            if name and shutil.which(name):
                return [name], False
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"], True
    what = "no C++ compiler was found" if native else f"this machine cannot build for {arch} by itself"
    raise BuildError(
        f"{what}. Install g++ or clang++ (for this architecture), or the Python package ziglang (for any)."
    )


def compiler_version(arch: str | None = None) -> str:
    """The first line of the compiler's own version, for the manifest."""
    command, zig = compiler_command(arch or _host_arch())
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return ("zig " if zig else "") + (done.stdout.splitlines() or ["unknown"])[0]


def _host_arch() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def build_levels(directory: Path, levels: Sequence[str], report: Report) -> list[Kernel]:
    """Build DIRECTORY/forward.cpp for each level, in parallel; kernels come in order of preference."""
    chosen = [level for level in LEVELS if level.name in {find_level(n).name for n in levels}]
    done = 0
    kernels: list[Kernel] = []
    with ThreadPoolExecutor(max(1, min(len(chosen), os.cpu_count() or 1))) as pool:
        for kernel in pool.map(lambda level: _build(directory, level), chosen):
            done += 1
            kernels.append(kernel)
            report(done, len(chosen))
    return kernels


def _build(directory: Path, level: Level) -> Kernel:
    command, zig = compiler_command(level.arch)
    source, library = directory / "forward.cpp", directory / f"forward.{level.name}.so"
    flags = (*_zig_flags(level), *_portable(FLAGS)) if zig else (*level.flags, *FLAGS)
    try:
        done = subprocess.run(
            [*command, *flags, str(source), "-o", str(library)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BuildError(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        raise BuildError(
            f"{' '.join(command)} could not build {source} for {level.name} (exit code {done.returncode}):\n"
            f"{_first_errors(done.stderr)}"
        )
    sources = ("forward.cpp", *sorted(p.name for p in directory.glob("*.h")))
    return Kernel(level.name, level.arch, level.features, library.name, sources, flags, oldest_glibc(library))


def _zig_flags(level: Level) -> tuple[str, ...]:
    """zig names targets and CPUs its own way; glibc is pinned, so that the library runs on old systems."""
    cpu = {"-march=x86-64-v4": "x86_64_v4", "-march=x86-64-v3": "x86_64_v3", "-march=x86-64": "x86_64"}
    march = cpu.get(level.flags[0], "generic")
    return ("-target", f"{level.arch}-linux-gnu.2.17", f"-mcpu={march}", *level.flags[1:])


def _portable(flags: Sequence[str]) -> tuple[str, ...]:
    """zig links its own C++ library statically and knows no flags for it."""
    return tuple(f for f in flags if f not in ("-static-libstdc++", "-static-libgcc"))


def _first_errors(text: str, most: int = 40) -> str:
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if "error" in line or "failed" in line), 0)
    return "\n".join(lines[start : start + most])


def oldest_glibc(library: Path) -> str:
    """The newest GLIBC symbol version that a library asks for: the oldest glibc it runs with."""
    found = {
        tuple(int(n) for n in m.split(b"."))
        for m in re.findall(rb"GLIBC_(\d+(?:\.\d+)+)", library.read_bytes())
    }
    return ".".join(map(str, max(found, default=(2, 0))))
