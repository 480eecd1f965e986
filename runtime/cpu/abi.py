"""The C ABI of docs/artifact.md in ctypes: its structures, its functions, and a library that has them."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runtime.artifact import Artifact
from runtime.cpu.elf import missing_bytes
from runtime.errors import ArtifactError

ABI = 3


class CKVGroup(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("slots", c.c_void_p),
        ("table", c.c_void_p),
        ("table_stride", c.c_int64),
    ]


class CStep(c.Structure):
    _fields_ = [
        ("num_tokens", c.c_int32), ("num_requests", c.c_int32), ("num_rows", c.c_int32),
        ("num_groups", c.c_int32),
        ("ids", c.c_void_p), ("pos", c.c_void_p),
        ("starts", c.c_void_p), ("lens", c.c_void_p), ("rows", c.c_void_p),
        ("groups", c.POINTER(CKVGroup)), ("arena", c.c_void_p), ("logits", c.c_void_p),
    ]  # fmt: skip


class CSampleArgs(c.Structure):
    _fields_ = [
        ("num_rows", c.c_int32), ("vocab_size", c.c_int32), ("num_top", c.c_int32), ("logits", c.c_void_p),
        ("temperature", c.c_void_p), ("top_p", c.c_void_p), ("min_p", c.c_void_p), ("top_k", c.c_void_p),
        ("seed", c.c_void_p), ("sample_index", c.c_void_p), ("position", c.c_void_p),
        ("ids", c.c_void_p), ("logprobs", c.c_void_p), ("top_ids", c.c_void_p), ("top_logprobs", c.c_void_p),
    ]  # fmt: skip


_P, _I = c.c_void_p, c.c_int32
_OF_DRAFTS = {"octavo_share_threads": (None, [_P, _P])}  # libraries of artifacts without a draft may lack it
_FUNCTIONS = {  # name: (result, arguments)
    "octavo_abi": (_I, []),
    "octavo_open": (_P, [c.POINTER(c.c_void_p), _I, _I]),
    "octavo_forward": (_I, [_P, c.POINTER(CStep)]),
    "octavo_sample": (_I, [_P, c.POINTER(CSampleArgs)]),
    "octavo_copy_blocks": (None, [_P, _I, _P, _P, _I]),
    "octavo_logprobs": (None, [_P, _P, _I, _P, _P]),
    "octavo_record": (None, [_P, _P, c.c_int64]),
    "octavo_set_weights": (None, [_P, c.POINTER(c.c_void_p)]),
    "octavo_close": (None, [_P]),
}


def pointers(addresses: Sequence[int]) -> c.Array[c.c_void_p]:
    return (c.c_void_p * len(addresses))(*addresses)


def address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def open_library(artifact: Artifact, name: str, *, draft: bool = False) -> c.CDLL:
    path = artifact.path(name)
    try:
        if missing := missing_bytes(path):
            raise OSError(f"it is cut short by {missing:,} bytes")
        library = c.CDLL(_spelled_by_content(path, artifact.manifest.files[name].sha256))
        for function, (result, arguments) in (_FUNCTIONS | (_OF_DRAFTS if draft else {})).items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ArtifactError(
            f"cannot be used ({error})",
            where=name,
            todo="Rebuild the kernels from the bundled source on this machine",
        ) from error
    if library.octavo_abi() != ABI:
        raise ArtifactError(
            f"ABI {library.octavo_abi()}; this runtime speaks {ABI}",
            where=name,
            todo="Compile the model again",
        )
    return library


def _spelled_by_content(path: Path, sha256: str) -> str:
    """The same path, with 64 bits of the content's hash written as `/` and `/.`: the dynamic loader takes a
    path that it has loaded before for the same library, even when the file has been replaced meanwhile.
    """
    bits = f"{int(sha256[:16], 16):064b}"
    return str(path.parent) + "".join("/." if bit == "1" else "/" for bit in bits) + "/" + path.name
