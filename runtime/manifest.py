"""manifest.json as checked, typed values. See docs/artifact.md.

The file is untrusted: every field is read by name, type and range, and a wrong one is refused with its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import ArtifactError, shorten, shown
from runtime.hashes import manifest_digest

FORMAT, VERSION = "octavo", 3
READABLE = (1, 2, 3)  # groups of version 1 have no tails, nor streams that are quantised; of 2 no states
MAX_INT32 = 2**31 - 1
MAX_JSON = 32 << 20  # bytes; what they become in memory is up to 25 times as much
SHA256 = re.compile(r"[0-9a-f]{64}")
TARGET_NAME = re.compile(r"[A-Za-z0-9_:.-]{1,64}")
ARCHES = {"cuda": r"sm_[0-9]{2,3}", "hip": r"gfx[0-9a-f]{3,8}", "interpret": r".*"}  # by backend
KV_BITS = {"f32": 32, "bf16": 16, "i8": 8, "f8e4m3": 8, "u4": 4, "u2": 2}  # of a stream's elements
KV_SCALES = {"i8": 1, "f8e4m3": 1, "u4": 2, "u2": 2}  # f16 numbers beside codes that share a scale


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str  # of the concatenated digests of its 8 MiB chunks


@dataclass(frozen=True)
class Model:
    dtype: str
    vocab_size: int
    max_context: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class KVGroup:
    """Layers that share tables and a block pool. window: keys at or below q - window are never read.

    block_bytes: of all layers, with scales, rounded up to 64; bytes_per_token is not rounded, and may be no
    whole number where tokens share scales. tail: it holds a request's last block alone, for the group that
    quantises that when it is full. state: of a recurrence, of which a request keeps the block of its last
    token, so that bytes_per_token is 0.
    """

    layers: int
    window: int | None
    block: int
    block_bytes: int
    bytes_per_token: float
    tail: bool = False
    state: bool = False

    @property
    def is_single(self) -> bool:
        """Whether a request keeps one block of it, however many tokens it has."""
        return self.tail or self.state


@dataclass(frozen=True)
class Kernel:
    isa: str
    arch: str
    features: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class CpuTarget:
    """weights: None in an artifact of shapes alone (octavo compile --no-weights).

    draft: the same model in fewer bits, which drafts tokens on the same KV blocks (octavo compile --draft).
    """

    graph: str
    plan: str
    weights: str | None
    weight_order: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    draft: CpuTarget | None = None


@dataclass(frozen=True)
class GpuTarget:
    """kernels: the file that lists the binaries (runtime.gpu). source: of all kernels.

    weights: None in an artifact of shapes alone. invariant: one order of accumulation whatever the step.
    """

    name: str  # as --target spells it
    backend: str
    arch: str
    graph: str
    plan: str
    kernels: str
    source: str
    weights: str | None
    weight_order: tuple[str, ...]
    invariant: bool
    built_by: Mapping[str, str]  # tool -> version


Target = CpuTarget | GpuTarget


@dataclass(frozen=True)
class Manifest:
    name: str
    digest: str  # "sha256:" and 64 hex digits
    model: Model
    tokenizer_files: tuple[str, ...]
    kv_groups: tuple[KVGroup, ...]
    targets: Mapping[str, Target]
    files: Mapping[str, FileEntry]
    raw: Mapping[str, Any]

    @property
    def weight_files(self) -> set[str]:
        """Those of all targets and drafts."""
        drafts = [t.draft for t in self.targets.values() if isinstance(t, CpuTarget) and t.draft]
        return {t.weights for t in (*self.targets.values(), *drafts) if t.weights is not None}


class Fields:
    """A JSON object being read; every refusal names the field."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ArtifactError(f"expected an object, found {shown(value)}", where=where, todo=_AGAIN)
        self.value, self.where = value, where

    def get(self, name: str) -> Any:
        if name not in self.value:
            raise ArtifactError(f"the field {name!r} is missing", where=self.where, todo=_AGAIN)
        return self.value[name]

    def bad(self, name: str, want: str) -> ArtifactError:
        found = shown(self.value.get(name))
        return ArtifactError(f"{name!r} must be {want}, found {found}", where=self.where, todo=_AGAIN)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str) or len(value) > 4096:
            raise self.bad(name, "a string of at most 4096 characters")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_INT32) -> int:
        value = self.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(name, f"an integer from {low} to {high}")
        return value

    def optional(self, name: str, low: int = 0, high: int = MAX_INT32) -> int | None:
        return None if self.value.get(name) is None else self.integer(name, low, high)

    def path(self, name: str) -> str:
        return safe_path(self.text(name), f"{self.where}.{name}")

    def optional_path(self, name: str) -> str | None:
        return None if self.get(name) is None else self.path(name)

    def boolean(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def object(self, name: str) -> Fields:
        return Fields(self.get(name), f"{self.where}.{name}")

    def array(self, name: str, limit: int) -> list[Any]:
        value = self.get(name)
        if not isinstance(value, list) or len(value) > limit:
            raise self.bad(name, f"a list of at most {limit} entries")
        return value

    def objects(self, name: str, limit: int) -> Iterator[Fields]:
        return (Fields(v, f"{self.where}.{name}[{i}]") for i, v in enumerate(self.array(name, limit)))

    def texts(self, name: str, limit: int) -> tuple[str, ...]:
        value = self.array(name, limit)
        if not all(isinstance(v, str) for v in value):
            raise self.bad(name, "a list of strings")
        return tuple(value)


_AGAIN = "Compile the artifact again, or get an undamaged copy"


def safe_path(text: str, where: str) -> str:
    """The path, if it is relative, `/`-separated and stays inside the artifact."""
    parts = text.split("/")
    if len(text) > 1024 or "\\" in text or "\0" in text or any(part in ("", ".", "..") for part in parts):
        todo = "Paths are relative, /-separated and without '..'"
        raise ArtifactError(
            f"the path {shown(text)} leaves the artifact or is malformed", where=where, todo=todo
        )
    return text


def parse_json(data: bytes, where: str) -> Any:
    """The value. Raises ArtifactError where it is not JSON or a key occurs twice: readers differ in which of
    the two counts."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a key occurs twice among {shown([key for key, _ in pairs])}")
        return found

    if len(data) > MAX_JSON:
        what = f"{len(data):,} bytes; of JSON at most {MAX_JSON:,} are read"
        raise ArtifactError(what, where=where, todo=_AGAIN)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        what = f"not valid JSON ({shorten(str(error), 200)})"
        raise ArtifactError(what, where=where, todo=_AGAIN) from error


def parse_manifest(data: bytes) -> Manifest:
    """Raises ArtifactError for another format or version, a wrong field, or a digest that does not fit."""
    raw = parse_json(data, "manifest.json")
    top = Fields(raw, "manifest.json")
    if top.text("format") != FORMAT:
        raise top.bad("format", repr(FORMAT))
    if top.integer("version") not in READABLE:
        todo = "Load it with a matching Octavo, or compile the model again"
        found, readable = top.integer("version"), ", ".join(map(str, READABLE[:-1]))
        what = f"format version {found}; this runtime reads {readable} and {READABLE[-1]}"
        raise ArtifactError(what, where=top.where, todo=todo)
    _check_digest(top)
    _check_notes(top)
    return Manifest(
        name=top.text("name"),
        digest=top.text("digest"),
        model=_model(top.object("model")),
        tokenizer_files=_tokenizer(top),
        kv_groups=_groups(top),
        targets=_targets(top.object("targets")),
        files=_files(top.object("files")),
        raw=raw,
    )


def _check_digest(top: Fields) -> None:
    try:
        digest = manifest_digest(top.value)
    except (ValueError, RecursionError) as error:  # lone surrogates, say
        raise ArtifactError(f"cannot be hashed ({error})", where=top.where, todo=_AGAIN) from error
    if top.text("digest") != digest:
        raise ArtifactError(
            f"its digest is {digest}, it says {shown(top.text('digest'))}", where=top.where, todo=_AGAIN
        )


def _check_notes(top: Fields) -> None:
    """What is there for people to read, and for tools that show it."""
    top.object("made_by")
    top.object("model").object("frozen")
    source = top.object("source")
    source.text("kind")
    source.text("path")


def _model(fields: Fields) -> Model:
    vocab_size = fields.integer("vocab_size", 1, 2**24)
    eos = fields.array("eos_token_ids", 4096)
    if not all(type(i) is int and 0 <= i < vocab_size for i in eos):
        raise fields.bad("eos_token_ids", f"a list of token ids below {vocab_size}")
    return Model(
        dtype=fields.text("dtype"),
        vocab_size=vocab_size,
        max_context=fields.integer("max_context", 1, 2**28),
        bos_token_id=fields.optional("bos_token_id", 0, vocab_size - 1),
        eos_token_ids=tuple(eos),
    )


def _tokenizer(top: Fields) -> tuple[str, ...]:
    if "tokenizer" not in top.value:
        return ()
    fields = top.object("tokenizer")
    if fields.value.get("present") is not True:
        return ()
    return tuple(safe_path(p, f"{fields.where}.files") for p in fields.texts("files", 64))


def _groups(top: Fields) -> tuple[KVGroup, ...]:
    fields = list(top.objects("kv_groups", 256))
    groups = tuple(map(_group, fields))
    if len({group.block for group in groups}) > 1:
        raise top.bad("kv_groups", "of one block size")
    _check_tails(top, fields, [group.tail for group in groups])
    return groups


def _check_tails(top: Fields, groups: list[Fields], tails: list[bool]) -> None:
    """One for each group whose tokens share scales, of the same layers and heads, after all others."""
    sealed = [_heads(g) for g, tail in zip(groups, tails, strict=True) if not tail and _shares_scales(g)]
    if sealed != [_heads(g) for g, tail in zip(groups, tails, strict=True) if tail]:
        raise top.bad("kv_groups", "with a tail for each group whose tokens share scales")
    if tails != sorted(tails):
        raise top.bad("kv_groups", "with tails after all others")
    for group in (g for g, tail in zip(groups, tails, strict=True) if tail):
        if group.value.get("window") is not None:
            raise group.bad("window", "null: it is a tail")
        for stream in group.objects("streams", 16):
            if stream.text("dtype") in KV_SCALES:
                raise stream.bad("dtype", "of plain elements: it is of a tail")


def _heads(group: Fields) -> tuple[Any, ...]:
    """What a group and its tail have in common."""
    streams = [
        (s.text("name"), s.integer("heads"), s.integer("head_size")) for s in group.objects("streams", 16)
    ]
    return group.integer("layers"), *streams


def _shares_scales(group: Fields) -> bool:
    return any(_is_per_channel(stream) for stream in group.objects("streams", 16))


def _group(fields: Fields) -> KVGroup:
    block, layers = fields.integer("block", 1, 4096), fields.integer("layers", 1, 2**20)
    tail = "tail" in fields.value and fields.boolean("tail")
    state = "state" in fields.value and fields.boolean("state")
    _check_state(fields, state, tail)
    need = layers * sum(_stream_bytes(stream, block) for stream in fields.objects("streams", 16))
    per_token = 0 if state else need // block if need % block == 0 else need / block
    if not need or fields.get("bytes_per_token") != per_token:
        raise fields.bad("bytes_per_token", f"{per_token}, as layers and streams say")
    block_bytes = fields.integer("block_bytes", need)
    if block_bytes % 64:
        raise fields.bad("block_bytes", "a multiple of 64")
    return KVGroup(layers, fields.optional("window", 1), block, block_bytes, per_token, tail, state)


def _check_state(group: Fields, state: bool, tail: bool) -> None:
    """It has a stream per block, which others have not, and all of its streams are f32."""
    streams = list(group.objects("streams", 16))
    if sum(stream.value.get("per") == "block" for stream in streams) != state:
        raise group.bad("streams", "with one per block: it is a state" if state else "without one per block")
    if not state:
        return
    if tail:
        raise group.bad("tail", "false: it is a state")
    if group.value.get("window") is not None:
        raise group.bad("window", "null: it is a state")
    for stream in streams:
        if stream.text("dtype") != "f32":
            raise stream.bad("dtype", "f32: it is of a state")


def _stream_bytes(stream: Fields, block: int) -> int:
    """Of a block in a layer. A head of codes that share bytes is filled up to 16 of them."""
    stream.text("name")
    dtype, heads, size = stream.text("dtype"), stream.integer("heads", 1), stream.integer("head_size", 1)
    if dtype not in KV_BITS:
        raise stream.bad("dtype", f"one of {', '.join(KV_BITS)}")
    if KV_BITS[dtype] < 8 and block % 16:
        raise stream.bad("dtype", f"of whole bytes: codes of {dtype} lie in strips of 16 tokens")
    filled = size if KV_BITS[dtype] >= 8 else -(-size // 16) * 16
    if stream.value.get("per") == "block":
        return heads * filled * KV_BITS[dtype] // 8
    shared = size if _is_per_channel(stream) else block
    return heads * (block * filled * KV_BITS[dtype] // 8 + KV_SCALES.get(dtype, 0) * shared * 2)


def _is_per_channel(stream: Fields) -> bool:
    """Whether the tokens of a block share its scales, which are one for each head and channel."""
    if "per" not in stream.value:
        return False
    if stream.text("per") not in ("token", "channel", "block"):
        raise stream.bad("per", "token, channel or, of a state, block")
    if stream.text("per") == "channel" and stream.text("dtype") not in ("u4", "u2"):
        raise stream.bad("per", "token: codes of u4 and u2 alone share scales by channel")
    return stream.text("per") == "channel"


def _targets(fields: Fields) -> dict[str, Target]:
    if not fields.value:
        raise ArtifactError("there is no target", where=fields.where, todo=_AGAIN)
    for name in fields.value:
        if not TARGET_NAME.fullmatch(name):
            raise fields.bad(name, "called by letters, digits and _:.-")
    return {n: _cpu(fields.object(n)) if n == "cpu" else _gpu(n, fields.object(n)) for n in fields.value}


def _cpu(fields: Fields) -> CpuTarget:
    kernels = tuple(
        Kernel(k.text("isa"), k.text("arch"), k.texts("features", 256), k.path("file"))
        for k in fields.objects("kernels", 64)
    )
    return CpuTarget(
        fields.path("graph"),
        fields.path("plan"),
        fields.optional_path("weights"),
        fields.texts("weight_order", 2**20),
        kernels,
        _draft(fields),
    )


def _draft(fields: Fields) -> CpuTarget | None:
    """A target's own, which has none itself, and weights where the target has some."""
    if fields.value.get("draft") is None:
        return None
    draft = fields.object("draft")
    if draft.value.get("draft") is not None:
        raise draft.bad("draft", "null: it is one itself")
    if (draft.get("weights") is None) != (fields.get("weights") is None):
        raise draft.bad("weights", "a path where its target has one, else null")
    return _cpu(draft)


def _gpu(name: str, fields: Fields) -> GpuTarget:
    backend = fields.text("backend")
    if backend not in ARCHES:
        raise fields.bad("backend", f"one of {', '.join(ARCHES)}")
    if not re.fullmatch(ARCHES[backend], fields.text("arch")):
        raise fields.bad("arch", f"an architecture of {backend}")
    tools = fields.object("built_by")
    return GpuTarget(
        name=name,
        backend=backend,
        arch=fields.text("arch"),
        graph=fields.path("graph"),
        plan=fields.path("plan"),
        kernels=fields.path("kernels"),
        source=fields.path("source"),
        weights=fields.optional_path("weights"),
        weight_order=fields.texts("weight_order", 2**20),
        invariant=fields.boolean("invariant"),
        built_by={tool: tools.text(tool) for tool in tools.value},
    )


def _files(fields: Fields) -> dict[str, FileEntry]:
    entries: dict[str, FileEntry] = {}
    for path in fields.value:
        entry = fields.object(safe_path(path, fields.where))
        if not SHA256.fullmatch(entry.text("sha256")):
            raise entry.bad("sha256", "64 hexadecimal digits")
        entries[path] = FileEntry(entry.integer("bytes", 0, 2**50), entry.text("sha256"))
    return entries
