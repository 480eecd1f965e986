"""Building shared libraries, one per ISA level, with the host's C++ compiler, or zig's if there is none."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import BuildError as BuildError

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
    todo = "Install g++ or clang++ (for this architecture), or the Python package ziglang (for any)"
    raise BuildError(what, where="--isa" if not native else "", todo=todo)


def compiler_version(arch: str | None = None) -> str:
    """The first line of the compiler's own version, for the manifest."""
    command, zig = compiler_command(arch or _host_arch())
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return ("zig " if zig else "") + (done.stdout.splitlines() or ["unknown"])[0]


def _host_arch() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def build_levels(directory: Path, levels: Sequence[str], report: Report) -> list[Kernel]:
    """Build a directory's *.cpp into a library for each level; kernels come in order of preference.

    All objects are built in parallel. With $OCTAVO_CACHE they are kept there by content, and found again.
    """
    chosen = [level for level in LEVELS if level.name in {find_level(n).name for n in levels}]
    sources = sorted(
        directory.glob("*.cpp"), reverse=True
    )  # forward.cpp, the longest to build, before common.cpp
    done = 0
    kernels: list[Kernel] = []
    with (
        tempfile.TemporaryDirectory(prefix="octavo-") as objects,
        ThreadPoolExecutor(max(1, min(len(chosen) * len(sources), os.cpu_count() or 1))) as pool,
    ):
        builds = [_Build(directory, Path(objects), level) for level in chosen]
        compiled = [[pool.submit(build.compile, source) for source in sources] for build in builds]
        for build, parts in zip(builds, compiled, strict=True):
            kernels.append(build.link([part.result() for part in parts]))
            done += 1
            report(done, len(chosen))
    return kernels


class _Build:
    """One level's library: its objects, and how they are built."""

    def __init__(self, directory: Path, objects: Path, level: Level) -> None:
        self.directory, self.objects, self.level = directory, objects, level
        self.command, zig = compiler_command(level.arch)
        self.flags = (*_zig_flags(level), *_portable(FLAGS)) if zig else (*level.flags, *FLAGS)

    def compile(self, source: Path) -> Path:
        """The object of a source file; from $OCTAVO_CACHE if it has been built before."""
        cache = os.environ.get("OCTAVO_CACHE")
        if not cache:
            return self._compile(source, self.objects / f"{source.stem}.{self.level.name}.o")
        kept = Path(cache) / f"{self._key(source)}.o"
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            made = self._compile(source, kept.with_suffix(f".{uuid.uuid4().hex}"))
            made.replace(kept)  # at once: another process may want it too
        return kept

    def _compile(self, source: Path, out: Path) -> Path:
        flags = [flag for flag in self.flags if flag not in LINK_FLAGS]
        self._run(source, [*flags, "-c", str(source), "-o", str(out)])
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
            done = subprocess.run([*self.command, *args], capture_output=True, text=True, check=False)
        except OSError as error:
            todo = "Check that CXX names a compiler that runs"
            raise BuildError(f"it could not be run: {error}", where=self.command[0], todo=todo) from error
        if done.returncode:
            raise BuildError(
                f"{' '.join(self.command)} could not build {what.name} for {self.level.name} (exit code "
                f"{done.returncode})",
                todo="Try a newer compiler, or another ($CXX names it). If it persists, report it",
                said=_first_errors(done.stderr),
            )

    def _key(self, source: Path) -> str:
        """Of all that decides an object: compiler, flags, and the text of the source and of every header."""
        found = hashlib.sha256(repr((self.command, compiler_version(self.level.arch), self.flags)).encode())
        for path in (source, *sorted(self.directory.glob("*.h"))):
            content = path.read_bytes()
            found.update(f"\n{path.name} {len(content)}\n".encode() + content)
        return found.hexdigest()


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
