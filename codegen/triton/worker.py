"""The process that compiles kernels: `build` starts some, and feeds them one kernel at a time.

A process of its own, because Triton either compiles or interprets in one, and because a fault of its compiler
ends the process. Reads and writes JSON, an object a line. Run as a script that imports nothing of ours,
so that it starts fast.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO, cast


def main() -> None:
    """Arguments: kernels.py, the backend, the architecture, the warp size."""
    source, backend, arch, warp_size = sys.argv[1:]
    answers = _own_stdout()
    compiler = Compiler(Path(source), backend, arch, int(warp_size))
    for line in sys.stdin:
        answers.write(json.dumps(_answer(compiler, json.loads(line))) + "\n")
        answers.flush()


def _answer(compiler: Compiler, job: dict[str, Any]) -> dict[str, Any]:
    try:
        return compiler.build(job)
    except Exception as error:  # whatever the compiler raises is the kernel's fault
        return {"error": f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc()}


def _own_stdout() -> TextIO:
    """The pipe for answers. What else is printed, such as by ptxas, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


class Compiler:
    """Compiles functions of one kernels.py for one architecture."""

    def __init__(self, source: Path, backend: str, arch: str, warp_size: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.backend = backend
        number = int(arch.removeprefix("sm_")) if backend == "cuda" else arch
        self.target = GPUTarget(backend, number, warp_size)
        self.module = _import(source)

    def build(self, job: dict[str, Any]) -> dict[str, Any]:
        """job: a kernel as kernels.json has it."""
        import triton
        from triton.compiler import ASTSource

        function = getattr(self.module, job["function"])
        signature, constants = dict(job["signature"]), dict(job["constants"])
        names = cast("list[str]", function.arg_names)
        divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in job["aligned"]}
        types = signature | dict.fromkeys(constants, "constexpr")
        ast = ASTSource(function, {name: types[name] for name in names}, constants, divisible)
        options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"], "enable_fp_fusion": True}
        found: Any = triton.compile(ast, target=self.target, options=options)
        return self._described(found)

    def _described(self, found: Any) -> dict[str, Any]:
        about, cuda = found.metadata, self.backend == "cuda"
        return {
            "symbol": about.name,
            "num_warps": about.num_warps,
            "shared_bytes": about.shared,
            "scratch_bytes": about.global_scratch_size or 0,
            "profile_scratch_bytes": about.profile_scratch_size or 0,
            "binary": base64.b64encode(found.asm["cubin" if cuda else "hsaco"]).decode(),
            "assembly": "" if cuda else found.asm["amdgcn"],
        }


def _import(source: Path) -> Any:
    spec = importlib.util.spec_from_file_location("kernels", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernels"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
