"""kernels.json of a GPU target: which binaries there are and how they are called. See docs/artifact.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.errors import ArtifactError
from runtime.gpu.device import KernelSpec
from runtime.gpu.plan import MAX_ARGS, TYPES
from runtime.manifest import Fields, parse_json

MAX_KERNELS = 2**16
MAX_SHARED_BYTES = 1 << 20
MAX_WARPS = 32
POINTERS = frozenset(
    {"*fp32", "*bf16", "*fp16", "*fp64", "*i64", "*u64", "*i32", "*u32", "*i8", "*u8", "*i16"}
)

Read = Callable[[str], bytes]  # a file of the target's folder


def parse_kernels(data: bytes, where: str, read: Read) -> list[KernelSpec]:
    """Raises ArtifactError where a field is wrong or a file is missing."""
    top = Fields(parse_json(data, where), where)
    return [_spec(fields, read) for fields in top.objects("kernels", MAX_KERNELS)]


def _spec(fields: Fields, read: Read) -> KernelSpec:
    file = fields.optional_path("file")
    for name in ("scratch_bytes", "profile_scratch_bytes"):
        if fields.integer(name) != 0:
            raise fields.bad(name, "0: the runtime gives kernels no scratch memory of their own")
    return KernelSpec(
        name=fields.text("name"),
        function=fields.text("function"),
        symbol=fields.text("symbol"),
        signature=tuple((name, _type(type_, fields)) for name, type_ in _pairs(fields, "signature")),
        constants=tuple((name, _constant(value, fields)) for name, value in _pairs(fields, "constants")),
        num_warps=fields.integer("num_warps", 1, MAX_WARPS),
        shared_bytes=fields.integer("shared_bytes", 0, MAX_SHARED_BYTES),
        binary=None if file is None else read(file),
    )


def _pairs(fields: Fields, name: str) -> list[tuple[str, Any]]:
    pairs = fields.array(name, MAX_ARGS)
    if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
        raise fields.bad(name, "a list of pairs of a name and a value")
    if len({name for name, _ in pairs}) < len(pairs):
        raise fields.bad(name, "a list of pairs whose names differ")
    return [(pair[0], pair[1]) for pair in pairs]


def _type(value: Any, fields: Fields) -> str:
    if not isinstance(value, str) or value not in TYPES | POINTERS:
        raise ArtifactError(
            f"{value!r} is no parameter's type", where=f"{fields.where}.signature", todo="Compile it again"
        )
    return value


def _constant(value: Any, fields: Fields) -> int | float | str:
    if not isinstance(value, int | float | str):
        raise fields.bad("constants", "numbers and texts")
    return value
