"""A device that is none: Triton's interpreter, numpy on host memory. For tests and for looking into kernels.

Triton decides when it is imported whether it interprets, so this needs a process in which nothing has
imported it for compiling.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np

from runtime import machine
from runtime.errors import ArtifactError, EngineError, ResourceError
from runtime.gpu.bf16 import round_casts
from runtime.gpu.device import Array, KernelSpec
from runtime.gpu.quick import quicken

ALIGNMENT = 256
_NUMBERS = {"i32": int, "i64": int, "u32": int, "u64": int, "fp32": float}


@dataclass(frozen=True, slots=True)
class Pointer:
    """What the interpreter asks of an argument that is a pointer."""

    address: int
    dtype: str

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True)
class InterpretedKernel:
    spec: KernelSpec
    run: Any  # Triton's executor of one function, by grid


@dataclass(frozen=True, slots=True)
class Recorded:
    launches: list[Callable[[], None]]

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class InterpretedDevice:
    """See runtime.gpu.device.Device. source: kernels.py."""

    name = "Triton's interpreter"

    def __init__(self, source: Path) -> None:
        interpreter = _interpreter()
        self._module = _import(source)
        self._executor, self._kind = _grid_executor(interpreter), interpreter.InterpretedFunction
        self._memory: dict[int, Array] = {}
        self._recording: list[Callable[[], None]] | None = None

    def allocate(self, num_bytes: int, what: str) -> int:
        try:
            raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            todo = "Use smaller max_step_tokens, max_requests or kv_memory"
            refused = f"{num_bytes} bytes for {what} cannot be had"
            raise ResourceError(refused, where="this machine", todo=todo) from error
        address = raw.ctypes.data + -raw.ctypes.data % ALIGNMENT
        self._memory[address] = raw
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def free_memory(self) -> int:
        return machine.free_memory()

    def host_array(self, num_bytes: int) -> Array:
        return np.zeros(num_bytes, np.uint8)

    def free_host(self, array: Array) -> None:
        pass

    def upload(self, address: int, source: Array) -> None:
        self._do(lambda: _copy(address, source.ctypes.data, source.nbytes))

    def download(self, target: Array, address: int) -> None:
        self._do(lambda: _copy(target.ctypes.data, address, target.nbytes))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._do(lambda: _copy(target, source, num_bytes))

    def load(self, specs: Sequence[KernelSpec]) -> list[InterpretedKernel]:
        return [InterpretedKernel(spec, self._function(spec)) for spec in specs]

    def _function(self, spec: KernelSpec) -> Any:
        found = getattr(self._module, spec.function, None)
        if not isinstance(found, self._kind):
            todo = "Compile the model again"
            raise ArtifactError(f"it has no kernel {spec.function!r}", where="kernels.py", todo=todo)
        return found

    def launch(self, kernel: InterpretedKernel, grid: tuple[int, int, int], args: Sequence[int]) -> None:
        spec = kernel.spec
        given = [
            Pointer(value, type_[1:]) if type_.startswith("*") else _NUMBERS[type_](value)
            for value, (_, type_) in zip(args, spec.signature, strict=True)
        ]
        self._do(lambda: self._run(kernel, grid, given))

    def _run(self, kernel: InterpretedKernel, grid: tuple[int, int, int], given: list[Any]) -> None:
        function = kernel.run
        run = self._executor(function.rewrite(), function.arg_names, grid)
        try:
            with np.errstate(all="ignore"):
                run(*given, **dict(kernel.spec.constants))
        except Exception as error:
            raise EngineError(
                f"the interpreter failed: {error}", where=kernel.spec.name, todo="Compile the model again"
            ) from error

    def _do(self, work: Callable[[], None]) -> None:
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def record(self, work: Callable[[], None]) -> Recorded:
        self._recording = []
        try:
            work()
            return Recorded(self._recording)
        finally:
            self._recording = None

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self._memory.clear()


def _copy(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)


def _interpreter() -> Any:
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError as error:
        raise ResourceError(
            "it needs Triton", where="triton-interpret", todo="Install it: pip install 'octavo[triton]'"
        ) from error
    knobs: Any = getattr(triton, "knobs")  # noqa: B009 - its stubs lack it
    if not knobs.runtime.interpret:
        raise ResourceError(
            "Triton was imported for compiling in this process",
            where="triton-interpret",
            todo="Use a fresh process, or set TRITON_INTERPRET=1 before it starts",
        )
    found: Any = interpreter
    round_casts(found)
    quicken(found)
    return found


def _grid_executor(interpreter: Any) -> Any:
    """Triton's own, but for the copies of its arguments: they are in host memory already.

    It puts its operations in the place of triton.language's at every call of a function, sums and maxima
    among them, which takes longer than most: here once per launch and module.
    """

    class HostExecutor(interpreter.GridExecutor):
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            put_in_place = interpreter._patch_lang
            done = set[int]()

            def once(function: Any) -> Any:
                names = id(function.__globals__)
                if names not in done:
                    done.add(names)
                    return put_in_place(function)

            interpreter._patch_lang = once
            try:
                super().__call__(*args, **kwargs)
            finally:
                interpreter._patch_lang = put_in_place

        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
            return args_dev, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            pass

    return HostExecutor


def _import(source: Path) -> Any:
    """kernels.py as a module of its own; the interpreter reads its functions' source from the file."""
    name = f"octavo_kernels_{abs(hash(str(source)))}"
    loader = SourceFileLoader(name, str(source))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever stands there
        raise ArtifactError(
            f"is no module of kernels ({type(error).__name__}: {error})",
            where=source.name,
            todo="Compile the model again",
        ) from error
    return module
