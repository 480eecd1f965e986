"""Imports point one way: ir <- passes <- codegen <- compiler, and the runtime sees none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"ir", "passes", "codegen", "compiler", "runtime"}
MAY_IMPORT = {
    "ir": {"ir"},
    "passes": {"ir", "passes"},
    "codegen": {"ir", "passes", "codegen"},
    "compiler": {"ir", "passes", "codegen", "compiler", "runtime"},
    "runtime": {"runtime"},
}
RUNTIME_LIBRARIES = {"numpy", "safetensors", "tokenizers", "jinja2"}
# What one device needs, imported when it is used.
DEVICE_LIBRARIES = {"cuda.py": {"cuda"}, "hip.py": {"hip"}, "interpret.py": {"triton"}}
IMPORTERS_ONLY = {"torch", "transformers", "onnx", "gguf", "accelerate"}
FILES = [path for package in sorted(OURS) for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, top-level module) of every import of a file, those inside functions too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            found.append((node.lineno, (node.module or "").split(".")[0]))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    wrong = [(line, name) for line, name in imports(path) if name in OURS - MAY_IMPORT[package] | {"tests"}]
    assert not wrong, f"{package} may import {sorted(MAY_IMPORT[package])} of ours"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_heavy_libraries_stay_in_the_importers(path: Path) -> None:
    if path.is_relative_to(ROOT / "compiler" / "importers"):
        return
    wrong = [(line, name) for line, name in imports(path) if name in IMPORTERS_ONLY]
    assert not wrong, "only compiler/importers may import torch, transformers, onnx, gguf"


def test_the_runtime_needs_its_four_libraries_only() -> None:
    allowed = RUNTIME_LIBRARIES | {"runtime"} | set(sys.stdlib_module_names)
    files = [path for path in FILES if path.is_relative_to(ROOT / "runtime")]
    assert files
    assert not [
        (p.name, line, name)
        for p in files
        for line, name in imports(p)
        if name not in allowed | (DEVICE_LIBRARIES.get(p.name, set()) if p.parent.name == "gpu" else set())
    ]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split())


@pytest.mark.parametrize("statement", ["import runtime", "import compiler", "import compiler.cli.main"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    heavy = {"torch", "transformers", "sympy", "networkx", "onnx", "ml_dtypes", "ir"}
    assert not loaded_by(statement) & heavy


@pytest.mark.parametrize("package", ["ir", "passes", "codegen"])
def test_the_middle_end_loads_without_torch(package: str) -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if path.relative_to(ROOT).parts[0] == package
    ]
    assert not loaded_by("\n".join(f"import {name}" for name in modules)) & IMPORTERS_ONLY
