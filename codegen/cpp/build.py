"""Building shared libraries, one per ISA level, with the host's C++ compiler, or zig's if there is none."""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from codegen.cache import Cache, default_cache
from codegen.errors import BuildError as BuildError
from codegen.scratch import scratch
from codegen.tools import Tools

Report = Callable[[int, int], None]


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
LINK_FLAGS = ("-shared", "-static-libstdc++", "-static-libgcc")


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
    known = ", ".join(level.name for level in LEVELS)
    raise BuildError(f"there is no ISA level {name!r}", where="--isa", todo=f"There are {known}")


def default_levels(*, bf16: bool, int8: bool = False) -> tuple[str, ...]:
    """Those of this machine's architecture at which kernels differ.

    bf16, int8: whether linears multiply such numbers; only these use BF16 instructions and VNNI.
    """
    if _host_arch() != "x86_64":
        return ("neon",)
    return ("v4-vnni-bf16",) * bf16 + ("v4-vnni",) * int8 + ("v4", "v3", "baseline")


def compiler_command(arch: str) -> tuple[list[str], bool]:
    """(command, whether it is zig's): $CXX, c++, g++ or clang++ for this machine's architecture, else zig.

    Raises BuildError saying what to install.
    """
    native = arch == _host_arch()
    if native:
        for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
            if name and shutil.which(name):
                return [os.path.abspath(name) if os.sep in name else name], False
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"], True
    what = "no C++ compiler was found" if native else f"this machine cannot build for {arch} by itself"
    todo = "Install g++ or clang++ (for this architecture), or the Python package ziglang (for any)"
    raise BuildError(what, where="--isa" if not native else "", todo=todo)


def compiler_version(arch: str | None = None) -> str:
    """The first line of the compiler's own version, for the manifest."""
    command, zig = compiler_command(arch or _host_arch())
    return ("zig " if zig else "") + _said_version(*command)


@functools.cache
def _said_version(*command: str) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or ["unknown"])[0]


def _host_arch() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def build_levels(
    directory: Path, levels: Sequence[str], report: Report, cache: Cache | None = None
) -> list[Kernel]:
    """Build a directory's *.cpp into a library for each level; kernels come in order of preference.

    All objects are built in parallel; those that were built before are found in the cache, by content. report
    counts objects. What goes wrong, or interrupts it, ends the compilers too. Raises BuildError.
    """
    kept = default_cache() if cache is None else cache
    chosen = [level for level in LEVELS if level.name in {find_level(n).name for n in levels}]
    # forward.cpp, the longest to build, comes before common.cpp
    sources = sorted(directory.glob("*.cpp"), reverse=True)
    jobs = max(1, min(len(chosen) * len(sources), len(os.sched_getaffinity(0))))
    with scratch() as folder, ThreadPoolExecutor(jobs) as pool, Tools(folder) as tools:
        builds = [_Build(directory, folder, level, tools, kept) for level in chosen]
        parts = [[pool.submit(build.compile, source) for source in sources] for build in builds]
        flat = [part for each in parts for part in each]
        for done, part in enumerate(as_completed(flat), 1):
            part.result()
            report(done, len(flat))
        linked = [
            pool.submit(build.link, [part.result() for part in each])
            for build, each in zip(builds, parts, strict=True)
        ]
        kernels = [library.result() for library in linked]
    kept.prune()
    return kernels


class _Build:
    """One level's library: its objects, and how they are built."""

    def __init__(self, directory: Path, objects: Path, level: Level, tools: Tools, cache: Cache) -> None:
        self.directory, self.objects, self.level = directory.absolute(), objects, level
        self.tools, self.cache = tools, cache
        self.command, zig = compiler_command(level.arch)
        self.flags = (*_zig_flags(level), *_portable(FLAGS)) if zig else (*level.flags, *FLAGS)
        self.made_by = compiler_version(level.arch), *platform.libc_ver(), *_search_paths()

    def compile(self, source: Path) -> Path:
        """The object of a source file; from the cache if it has been built before."""
        out, key = self.objects / f"{source.stem}.{self.level.name}.o", self._key(source)
        found = self.cache.get("objects", key)
        if found is not None:
            out.write_bytes(found)
            return out
        flags = [flag for flag in self.flags if flag not in LINK_FLAGS]
        self._run(source, [*flags, "-c", source.name, "-o", str(out)])  # no object names its folder
        self.cache.put("objects", key, out.read_bytes())
        return out

    def link(self, objects: Sequence[Path]) -> Kernel:
        library = self.directory / f"forward.{self.level.name}.so"
        self._run(library, [*self.flags, *map(str, objects), "-o", str(library)])
        headers = sorted(path.name for path in self.directory.glob("*.h"))
        sources = (*sorted((p.name for p in self.directory.glob("*.cpp")), reverse=True), *headers)
        level, glibc = self.level, oldest_glibc(library)
        return Kernel(level.name, level.arch, level.features, library.name, sources, self.flags, glibc)

    def _run(self, what: Path, args: Sequence[str]) -> None:
        try:
            code, said = self.tools.run([*self.command, *args], self.directory)
        except OSError as error:
            todo = "Check that CXX names a compiler that runs"
            raise BuildError(f"it could not be run: {error}", where=self.command[0], todo=todo) from error
        if code and os.strerror(errno.ENOSPC) in said:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(_full(self.objects, what)))
        if code:
            raise BuildError(
                f"{' '.join(self.command)} could not build {what.name} for {self.level.name} (exit code "
                f"{code})",
                todo="Try a newer compiler, or another ($CXX names it). If it persists, report it",
                said=_first_errors(said),
            )

    def _key(self, source: Path) -> str:
        """Of all that decides an object: compiler, flags, and the text of the source and of every header."""
        found = hashlib.sha256(repr((self.command, self.made_by, self.flags)).encode())
        for path in (source, *sorted(self.directory.glob("*.h"))):
            content = path.read_bytes()
            found.update(f"\n{path.name} {len(content)}\n".encode() + content)
        return found.hexdigest()


def _search_paths() -> list[str | None]:
    """What g++ and clang++ read of the environment that decides which headers and tools they take."""
    return [os.environ.get(n) for n in ("CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX")]


def _full(temporary: Path, what: Path) -> Path:
    """Of the two folders that a compiler writes to the one with less room."""
    return min(temporary, what.parent, key=lambda folder: shutil.disk_usage(folder).free)


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
