"""The names of the package: each is there, as a type checker sees it, and costs nothing until used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import runtime


def declared() -> dict[str, str]:
    """The module of every name that a type checker sees."""
    (guard,) = (n for n in ast.parse(Path(runtime.__file__).read_text()).body if isinstance(n, ast.If))
    return {a.name: n.module or "" for n in guard.body if isinstance(n, ast.ImportFrom) for a in n.names}


def test_names_are_those_that_a_type_checker_sees():
    assert sorted(declared()) == sorted(runtime.__all__)
    for name, module in declared().items():
        assert getattr(runtime, name).__module__ == module


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'runtime' has no attribute 'genrate'"):
        runtime.genrate  # noqa: B018
    assert {"generate", "load"} <= set(dir(runtime))


def test_importing_the_package_imports_no_library():
    code = "import sys, runtime, runtime.errors; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(runtime.__file__).parents[1]).returncode == 0
