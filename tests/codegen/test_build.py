"""Building: what goes wrong says what the compiler said, and levels are tried in order of preference."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from codegen import cpp
from codegen.cpp.build import FLAGS
from ir.types import DType
from tests.codegen.harness import arg, best_level, lower, paged_builder, weight


def write(directory: Path, text: str) -> Path:
    (directory / "forward.cpp").write_text(text)
    return directory


def test_a_compile_error_shows_the_compilers_message(tmp_path: Path) -> None:
    with pytest.raises(cpp.BuildError, match="(?s)exit code.*no_such_name"):
        cpp.build(write(tmp_path, "int f() { return no_such_name; }\n"), [best_level()])


def test_an_unknown_level_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    with pytest.raises(cpp.BuildError, match="no ISA level 'v9'. There are v4-vnni-bf16"):
        cpp.build(write(tmp_path, ""), ["v9"])


def test_no_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(cpp.BuildError, match="Install g"):
        cpp.build(write(tmp_path, ""), [best_level()])


def test_libraries_come_in_order_of_preference(tmp_path: Path) -> None:
    names = list(reversed(cpp.default_levels(bf16=True)))
    kernels = cpp.build(write(tmp_path, "int f() { return 1; }\n"), names)
    assert [k.isa for k in kernels] == list(cpp.default_levels(bf16=True))
    assert all((tmp_path / k.file).is_file() and k.sources == ("forward.cpp",) for k in kernels)


def test_an_object_is_built_again_only_if_something_it_is_made_of_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, name = tmp_path / "cache", best_level()
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))
    found = []
    for index, (flags, number, text) in enumerate(
        [((), 1, "A"), ((), 1, "A"), ((), 2, "A"), ((), 1, "A + 1"), (("-DB",), 1, "A"), ((), 1, "A")]
    ):
        directory = tmp_path / str(index)
        directory.mkdir()
        (directory / "a.h").write_text(f"#define A {number}\n")
        source = (
            f'#include "a.h"\nextern "C" __attribute__((visibility("default"))) int f() {{ return {text}; }}'
        )
        monkeypatch.setattr(sys.modules["codegen.cpp.build"], "FLAGS", (*FLAGS, *flags))
        (kernel,) = cpp.build(write(directory, source), [name])
        found.append(
            (ctypes.CDLL(str(directory / kernel.file)).f(), len(list((cache / "objects").iterdir())))
        )
    assert found == [(1, 1), (1, 1), (2, 2), (2, 3), (1, 4), (1, 4)]


@pytest.mark.parametrize(
    ("machine", "dtype", "levels"),
    [
        ("x86_64", DType.F32, ("v4", "v3", "baseline")),
        ("x86_64", DType.F16, ("v4", "v3", "baseline")),
        ("x86_64", DType.BF16, ("v4-vnni-bf16", "v4", "v3", "baseline")),
        ("aarch64", DType.BF16, ("neon",)),
    ],
)
def test_only_linears_of_bf16_are_built_with_bf16_instructions(
    machine: str, dtype: DType, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("table", 8, 4))
    x = b.op("cast", x, dtype="bf16") if dtype is DType.BF16 else x
    graph = lower(b.graph([b.op("linear", x, weight("w", 8, 4, dtype=dtype), None, None, dtype="f32")]))
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert cpp.generate(graph).default_levels == levels


@pytest.mark.parametrize(
    ("codes", "x_dtype", "levels"),
    [
        ("u4", "i8", ("v4-vnni", "v4", "v3", "baseline")),
        ("u4", None, ("v4", "v3", "baseline")),
        ("f8e4m3", "i8", ("v4", "v3", "baseline")),
    ],
)
def test_only_products_of_integers_are_built_with_vnni(
    codes: str, x_dtype: str | None, levels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("table", 8, 32))
    parts = weight("w", 8, 32, dtype=DType(codes)), weight("s", 8, 1)
    graph = lower(b.graph([b.op("qlinear", x, *parts, group_size=32, x_dtype=x_dtype, dtype="f32")]))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert cpp.generate(graph).default_levels == levels
