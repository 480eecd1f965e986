"""Hashes are those of docs/artifact.md."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from runtime.hashes import CHUNK_BYTES, file_hash, manifest_digest


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 7])
def test_a_file_hash_is_the_hash_of_its_chunk_hashes(tmp_path: Path, size: int) -> None:
    data = bytes(i * 31 % 251 for i in range(1000)) * (size // 1000 + 1)
    data = data[:size]
    (tmp_path / "f").write_bytes(data)
    joined = b"".join(hashlib.sha256(data[i : i + 8388608]).digest() for i in range(0, size, 8388608))
    assert file_hash(tmp_path / "f") == hashlib.sha256(joined).hexdigest()


def test_the_digest_is_of_the_canonical_json_without_itself() -> None:
    canonical = '{"a":{"x":1,"y":"ü"},"b":[1,2]}'
    expected = "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
    assert manifest_digest({"b": [1, 2], "digest": "old", "a": {"y": "ü", "x": 1}}) == expected
