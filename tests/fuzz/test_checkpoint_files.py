"""What a checkpoint's files must not do: lead out of their directory, claim absurd sizes, or take long."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from compiler.checkpoint import MAX_HEADER_BYTES, MAX_INDEX_BYTES, open_checkpoint
from compiler.errors import CompileError
from compiler.files import check_links

INDEX = "model.safetensors.index.json"
ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def test_a_link_out_of_the_directory_is_refused(checkpoint: Path) -> None:
    save_file(ARRAYS, checkpoint.parent / "elsewhere.safetensors")
    (checkpoint / "model.safetensors").symlink_to(checkpoint.parent / "elsewhere.safetensors")
    with pytest.raises(CompileError, match="'model.safetensors' is a symbolic link to .*elsewhere") as caught:
        open_checkpoint(checkpoint)
    assert caught.value.todo


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", INDEX])
def test_so_is_one_of_any_file_that_is_read(checkpoint: Path, name: str) -> None:
    (checkpoint / name).symlink_to("/etc/passwd")
    with pytest.raises(CompileError, match=f"'{name}' is a symbolic link to '/etc/passwd'"):
        check_links(checkpoint)


def test_links_inside_of_it_and_the_hubs_are_followed(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    save_file(ARRAYS, cache / "blobs/77aa")
    (snapshot / "model.safetensors").symlink_to("../../blobs/77aa")
    source, _ = open_checkpoint(snapshot)
    assert np.array_equal(source.read("a"), ARRAYS["a"])
    (snapshot / "config.json").symlink_to("../../refs")
    with pytest.raises(CompileError, match="symbolic link"):
        open_checkpoint(snapshot)


def test_a_directory_that_is_itself_a_link_is_a_users_choice(checkpoint: Path, tmp_path: Path) -> None:
    save_file(ARRAYS, checkpoint / "model.safetensors")
    (tmp_path / "link").symlink_to(checkpoint)
    assert open_checkpoint(tmp_path / "link")[0].names == ("a",)


def test_a_loop_and_a_pipe_are_no_files(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CompileError, match="symbolic link"):
        open_checkpoint(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    with pytest.raises(CompileError):
        open_checkpoint(checkpoint)


def write(folder: Path, tree: Any, data: bytes = b"") -> None:
    text = json.dumps(tree).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": [[["F32"]]], "shape": [], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 17, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**64], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**60]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
    ],
)
def test_an_absurd_tensor_is_refused(checkpoint: Path, entry: Any) -> None:
    write(checkpoint, {"a": entry}, bytes(8))
    with pytest.raises(CompileError, match="tensor 'a'"):
        open_checkpoint(checkpoint)


def test_what_nests_deep_is_shown_short(checkpoint: Path) -> None:
    deep = b"[" * 900 + b"]" * 900
    text = b'{"a": {"dtype": ' + deep + b', "shape": [], "data_offsets": [0, 0]}}'
    (checkpoint / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CompileError) as caught:
        open_checkpoint(checkpoint)
    assert len(str(caught.value)) < 1000


def test_headers_and_indices_have_a_most(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 9)
    with pytest.raises(CompileError, match="claims"):
        open_checkpoint(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with (checkpoint / INDEX).open("wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(CompileError, match="at most"):
        open_checkpoint(checkpoint)


def test_an_index_of_many_tensors_is_read_in_time(checkpoint: Path) -> None:
    """Each was looked for among all: 20,000 took a minute."""
    names = [f"layers.{i}.weight" for i in range(20_000)]
    write(checkpoint, {n: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in names})
    (checkpoint / "model.safetensors").rename(checkpoint / "one.safetensors")
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "one.safetensors")}))
    before = time.process_time()
    source, _ = open_checkpoint(checkpoint)
    assert len(source.names) == 20_000 and time.process_time() - before < 5


def test_a_terminals_commands_in_names_are_escaped(checkpoint: Path) -> None:
    write(checkpoint, {"\x1b[31mred\u202e": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))
    (checkpoint / "model.safetensors").rename(checkpoint / "\x1b]0;title\x07.safetensors")
    with pytest.raises(CompileError) as caught:
        open_checkpoint(checkpoint)
    assert str(caught.value).isprintable() and "\\x1b[31mred" in str(caught.value)
