"""Building binaries of a kernels.py ahead of time, without the device: kernels.json and what it lists.

Kernels are compiled in worker processes. What was compiled before, here or for another model, is found by
content: the same function, constants, options, device and compiler give the same binary.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from codegen.cache import Cache, default_cache
from codegen.errors import REPORT
from codegen.scratch import scratch
from codegen.tools import Tools
from codegen.triton.devices import Device
from codegen.triton.launch import Kernel
from codegen.triton.resources import Resources, occupancy, of_amdgcn, of_cubin
from codegen.triton.toolchain import BuildError, versions
from codegen.triton.workers import Workers

Report = Callable[[int, int], None]
SOURCE = "kernels/kernels.py"
EXTENSION = {"cuda": "cubin", "hip": "hsaco"}
CACHE_VERSION = 1
_ANSWER = {"symbol", "num_warps", "shared_bytes", "scratch_bytes", "profile_scratch_bytes", "binary"} | {
    field.name for field in fields(Resources)
}  # what is kept of a kernel


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel as kernels.json lists it; `file` is relative to the target's folder.

    Of one for the interpreter there is no file, and nothing is known of what it takes.
    spills: bytes per thread. matrix: matrix instructions in the code, by kind. See codegen.triton.resources.
    """

    kernel: Kernel
    symbol: str
    file: str | None
    shared_bytes: int = 0
    scratch_bytes: int = 0
    profile_scratch_bytes: int = 0
    registers: int | None = None
    spills: int | None = None
    occupancy: float | None = None
    matrix: Mapping[str, int] | None = None

    @property
    def json(self) -> dict[str, Any]:
        return {**asdict(self.kernel), **{k: v for k, v in asdict(self).items() if k != "kernel"}}


def build_kernels(
    directory: Path,
    kernels: Sequence[Kernel],
    device: Device,
    report: Report = lambda done, total: None,
    *,
    cache: Cache | None = None,
    fewer_stages: bool = False,
) -> list[BuiltKernel]:
    """Build kernels of DIRECTORY/kernels/kernels.py into DIRECTORY/kernels/, a file each.

    cache: where binaries are kept; default default_cache(). fewer_stages: where a kernel's shared memory does
    not fit the device, buffer fewer stages of its loops until it does.
    Raises BuildError naming the kernel that cannot be built.
    """
    if device.interpreted:
        return [BuiltKernel(kernel, kernel.function, None) for kernel in kernels]
    kept = default_cache() if cache is None else cache
    built = _Builder(directory, device, kept, fewer_stages).build(kernels, report)
    kept.prune()
    return built


def kernels_json(built: Sequence[BuiltKernel], device: Device) -> dict[str, Any]:
    """The content of kernels.json."""
    made_by = {} if device.interpreted else versions(device.backend, device.arch)
    kernels = [kernel.json for kernel in built]
    return {"target": device.target, "source": SOURCE, "made_by": made_by, "kernels": kernels}


class _Builder:
    def __init__(self, directory: Path, device: Device, cache: Cache, fewer_stages: bool) -> None:
        self.directory, self.device, self.fewer_stages = directory, device, fewer_stages
        self.source = directory / SOURCE
        self._texts = _closures(self.source.read_text())
        self._versions = versions(device.backend, device.arch)
        self._cache = cache

    def build(self, kernels: Sequence[Kernel], report: Report) -> list[BuiltKernel]:
        count = min(len(kernels), 16, len(os.sched_getaffinity(0)))
        found: dict[Kernel, BuiltKernel] = {}
        with scratch() as folder, ThreadPoolExecutor(max(1, count)) as pool, Tools(folder) as tools:
            workers = Workers(self.source, self.device, tools)
            futures = {pool.submit(self._built, kernel, workers): kernel for kernel in kernels}
            for done, future in enumerate(as_completed(futures), 1):
                found[futures[future]] = future.result()
                report(done, len(kernels))
        return [found[kernel] for kernel in kernels]

    def _built(self, kernel: Kernel, workers: Workers) -> BuiltKernel:
        """One kernel, its binary written."""
        answer = self._answer(kernel, workers)
        while answer["shared_bytes"] > self.device.shared_bytes:
            if not self.fewer_stages or kernel.num_stages == 1:
                raise BuildError(
                    f"kernel {kernel.name} for {self.device.target} takes {answer['shared_bytes']:,} bytes "
                    f"of shared memory; a block has {self.device.shared_bytes:,}",
                    todo=REPORT,
                )
            kernel = replace(kernel, num_stages=kernel.num_stages - 1)
            answer = self._answer(kernel, workers)
        binary = base64.b64decode(answer.pop("binary"))
        file = f"kernels/{kernel.name}.{EXTENSION[self.device.backend]}"
        (self.directory / file).write_bytes(binary)
        num_warps = answer.pop("num_warps")
        taken = occupancy(self.device, num_warps, answer["registers"], answer["shared_bytes"])
        kernel = replace(kernel, num_warps=num_warps)
        return BuiltKernel(kernel, file=file, occupancy=round(taken, 3), **answer)

    def _answer(self, kernel: Kernel, workers: Workers) -> dict[str, Any]:
        """From the cache, or of a worker."""
        key = self._key(kernel)
        found = _kept(self._cache.get("kernels", key))
        if found is None:
            found = _measured(workers.build(asdict(kernel)))
            self._cache.put("kernels", key, json.dumps(found).encode())
        return found

    def _key(self, kernel: Kernel) -> str:
        """Of everything that the binary depends on."""
        told = asdict(kernel) | {"name": ""}
        device = (self.device.backend, self.device.arch, self.device.warp_size)
        text = json.dumps([CACHE_VERSION, self._versions, device, told, self._texts[kernel.function]])
        return hashlib.sha256(text.encode()).hexdigest()


def _kept(content: bytes | None) -> dict[str, Any] | None:
    """What the cache holds, if it is what `_measured` returned."""
    try:
        found = json.loads(content or b"")
        whole = found.keys() == _ANSWER and base64.b64decode(found["binary"]).startswith(b"\x7fELF")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return found if whole else None


def _measured(answer: dict[str, Any]) -> dict[str, Any]:
    """A worker's answer, with the resources that the binary takes in place of its assembly."""
    assembly = answer.pop("assembly")
    used = of_amdgcn(assembly) if assembly else of_cubin(base64.b64decode(answer["binary"]), answer["symbol"])
    return {**answer, **asdict(used)}


def _closures(source: str) -> dict[str, list[str]]:
    """For each definition of a module its text, and those of the functions and constants that it may use."""
    nodes = {name: node for node in ast.parse(source).body for name in _defined(node)}
    texts = {name: ast.get_source_segment(source, node) or "" for name, node in nodes.items()}
    named = {
        name: {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & set(nodes)
        for name, node in nodes.items()
    }
    return {name: [texts[n] for n in sorted(_reached(name, named))] for name in nodes}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _reached(name: str, named: Mapping[str, set[str]]) -> set[str]:
    found, todo = {name}, [name]
    while todo:
        new = named[todo.pop()] - found
        found |= new
        todo += new
    return found


if __name__ == "__main__":
    from codegen.triton.rebuild import main

    main()
