"""A GGUF file that was cut, anywhere: one line that names it, whatever is left of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.cli.refused import Commands, little_memory


def write(path: Path) -> bytes:
    """A small file of numbers, texts, lists and two tensors, as gguf writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_tensor("token_embd.weight", np.zeros((17, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_file_that_was_cut_anywhere(commands: Commands, tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf")
    data = len(whole) - 18 * 32 * 4
    rng = np.random.default_rng(0)
    lengths = {*range(0, data, 3), data - 1, data, *rng.integers(data, len(whole) - 1, 12).tolist()}
    lengths.add(len(whole) - 1)
    with little_memory():
        for length in sorted(lengths):
            (tmp_path / "m.gguf").write_bytes(whole[:length])
            commands.refuses("compile", tmp_path / "m.gguf", "-o", tmp_path / "m.octavo", where="m.gguf")


def test_a_file_that_claims_2_to_the_60th(commands: Commands, tmp_path: Path) -> None:
    """Tensors, fields, a text's length: at its place in the header of version 3."""
    whole = write(tmp_path / "m.gguf")
    for at in (8, 16, 24):
        claim = whole[:at] + (2**60).to_bytes(8, "little") + whole[at + 8 :]
        (tmp_path / "m.gguf").write_bytes(claim)
        with little_memory():
            commands.refuses("compile", tmp_path / "m.gguf", "-o", tmp_path / "m.octavo", where="m.gguf")
