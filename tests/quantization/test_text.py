"""Windows of text, how they are packed for a paged graph, and the text that comes with the compiler."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import numpy as np
import pytest

import compiler
from compiler.errors import CompileError
from compiler.quantization import text
from compiler.quantization.text import FEWEST, LONGEST, RANDOM, packed, read_text, windows


class Letters:
    """A tokenizer whose tokens are letters after a BOS of 1."""

    def encode(self, given: str) -> list[int]:
        return [1, *map(ord, given)]


def test_windows_begin_as_prompts_do() -> None:
    found = windows(Letters(), "abcdefgh", "a text", 4, 10, 200)  # type: ignore[arg-type]
    assert [ids.tolist() for ids in found.ids] == [[1, 97, 98, 99], [1, 100, 101, 102], [1, 103, 104]]
    assert found.num_tokens == 11
    assert windows(Letters(), "abcdefgh", "a text", 4, 2, 200).num_tokens == 8  # type: ignore[arg-type]


def test_a_text_shorter_than_a_window_is_one() -> None:
    (ids,) = windows(Letters(), "ab", "a text", 512, 4, 200).ids  # type: ignore[arg-type]
    assert ids.tolist() == [1, 97, 98]


def test_a_text_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="a text: the text has 0 tokens"):
        windows(Letters(), "", "a text", 4, 2, 200)  # type: ignore[arg-type]
    for name, content in (("empty", b""), ("blank", b" \n"), ("bytes", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CompileError, match=f"--calibration .*{name}: it is"):
            read_text(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")  # which would be waited for
    for strange in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(CompileError, match=f"--calibration {strange}: it is no file"):
            read_text(strange)
    with pytest.raises(CompileError, match="No such file"):
        read_text(tmp_path / "none")
    with pytest.raises(CompileError, match="directory"):
        read_text(tmp_path)


def test_without_a_tokenizer_tokens_are_random_and_said_to_be() -> None:
    found = windows(None, "abc", "a text", 8, 3, 50)
    assert found.source == RANDOM and found.num_tokens == 24
    assert all(len(ids) >= FEWEST and ids.min() >= 0 and ids.max() < 50 for ids in found.ids)


def test_requests_have_blocks_of_their_own() -> None:
    given = [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
    found = packed(given, {"kv0": 2}, every=2)
    assert found["starts"].tolist() == [0, 5, 8] and found["lens"].tolist() == [5, 3]
    assert found["pos"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert found["rows"].tolist() == [0, 2, 4, 5, 7]
    assert found["table0"].tolist() == [[1, 2, 3], [4, 5, 0]]
    assert found["slots0"].tolist() == [2, 3, 4, 5, 6, 8, 9, 10]


def test_the_two_texts_have_no_line_in_common() -> None:
    calibration, held_out = (text.default_text(name) for name in (text.CALIBRATION, text.HELD_OUT))
    lines = [{line for line in each.splitlines() if len(line) > 30} for each in (calibration, held_out)]
    assert not lines[0] & lines[1]
    assert len(calibration) > 40_000 and len(held_out) > 15_000


def test_wheels_carry_the_texts() -> None:
    root = Path(compiler.__file__).parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["compiler.quantization"]
    assert {p.stem for p in (root / "quantization").glob(pattern)} == {text.CALIBRATION, text.HELD_OUT}


def test_of_a_long_text_only_the_beginning_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"\xef\xbb\xbf" + "é".encode() * (LONGEST + 5))  # with a mark of its byte order
    assert read_text(path) == "é" * LONGEST
