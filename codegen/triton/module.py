"""The module that a target's Triton functions are printed into, kernels.py, and the binaries made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from codegen.triton.devices import Device
from codegen.triton.launch import Constant, Kernel

PRELUDE = tuple(
    Path(__file__).parent / "templates" / name for name in ("prelude.py", "quantized.py", "sampling.py")
)


@dataclass
class Module:
    device: Device
    functions: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])
    kernels: dict[Kernel, Kernel] = field(default_factory=dict[Kernel, Kernel])  # without a name -> named

    def function(self, stem: str, params: Sequence[str], constants: Sequence[str], body: str) -> str:
        """The name of a function; equal ones are one."""
        signature = ", ".join([*params, *(f"{name}: tl.constexpr" for name in constants)])
        key = (stem, signature, body)
        if key not in self.functions:
            same = sum(known == stem for known, _, _ in self.functions)
            self.functions[key] = f"{stem}_{same}" if same else stem
        return self.functions[key]

    def kernel(
        self,
        function: str,
        *,
        signature: tuple[tuple[str, str], ...],
        constants: tuple[tuple[str, Constant], ...],
        aligned: tuple[str, ...],
        num_warps: int,
        num_stages: int,
    ) -> Kernel:
        key = Kernel("", function, signature, constants, aligned, num_warps, num_stages)
        if key not in self.kernels:
            same = sum(known.function == function for known in self.kernels)
            self.kernels[key] = Kernel(
                f"{function}.{same}", function, signature, constants, aligned, num_warps, num_stages
            )
        return self.kernels[key]

    def source(self, title: str) -> str:
        """kernels.py."""
        shared = [_after(path.read_text(), "import triton.language as tl\n").strip() for path in PRELUDE]
        parts = [f'"""{title}"""', "import triton\nimport triton.language as tl\n", "\n\n\n".join(shared)]
        for (_, signature, body), name in self.functions.items():
            parts.append(
                f"\n@triton.jit\ndef {name}({_wrapped(signature, len(name))}):\n{_indented(body).rstrip()}"
            )
        return "\n\n".join(parts) + "\n"


def _after(text: str, line: str) -> str:
    return text[text.index(line) + len(line) :]


def _wrapped(signature: str, taken: int) -> str:
    if taken + len(signature) < 100:
        return signature
    lines, line = [], "    "
    for part in signature.split(", "):
        if len(line) + len(part) > 100:
            lines.append(line.rstrip())
            line = "    "
        line += part + ", "
    return "\n" + "\n".join([*lines, line.rstrip()]) + "\n"


def _indented(body: str) -> str:
    return "".join(f"    {line}\n" if line.strip() else "\n" for line in body.strip("\n").splitlines())
