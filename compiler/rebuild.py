"""An artifact made again from another's graph and weights, so that none of the code in that one is run.

What is taken is data: the graph's text (parsed and verified), the packed weights, the tokenizer's files and
the model's numbers. Buffers are planned again, and sources are generated and built here. A graph decides what
memory its kernels touch, so what they could touch beyond their arrays is refused.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from codegen.cache import default_cache
from codegen.kv_block import BLOCKS
from compiler import manifest
from compiler.artifact import ArtifactWriter
from compiler.errors import CompileError
from compiler.refusal import OF_A_MODEL, OF_A_TEXT, refusal
from compiler.targets import CpuDraft, CpuTarget, find_targets
from ir.dims import evaluate
from ir.graph import Graph, Op, Scalar, Value, tensor_of
from ir.ops import ANNOTATIONS
from ir.text import parse
from ir.types import KV
from ir.verify import verify
from passes.group_pointwise import GroupPointwise
from passes.plan_memory import PlanMemory
from runtime.artifact import Artifact
from runtime.manifest import CpuTarget as GivenTarget
from runtime.manifest import Manifest
from runtime.weights import tensor_bytes

AGAIN = "Compile the checkpoint instead"
STEP_SIZES = re.compile(r"T|R|Q|M[0-9]+")
STEP_INPUTS = re.compile(r"ids|pos|lens|starts|rows|(slots|table|kv)[0-9]+")


def rebuild(
    engine: str | Path,
    out: str | Path,
    *,
    isa: Sequence[str] | None = None,
    digest: str | None = None,
    force: bool = False,
) -> Path:
    """Write the artifact `out` with the CPU kernels of `engine`'s graph, generated and built here.

    digest: of `engine`, as load() takes it. Targets for GPUs are left out. Raises CompileError and
    ArtifactError.
    """
    artifact = Artifact.open(engine, digest=digest)
    if Path(out).resolve() == artifact.root:
        raise CompileError("it would replace what it reads", where=str(out), todo="Choose another with -o")
    where = f"{artifact.root.name}/{artifact.cpu.graph}"
    try:
        with ArtifactWriter(Path(out), force) as writer:
            return _write(artifact, _parts(artifact, isa), writer)
    except (*OF_A_MODEL, *OF_A_TEXT) as error:
        raise refusal(error, where) from error
    except (ValueError, KeyError) as error:  # of a pass or a printer, on what no compile of ours makes
        raise CompileError(f"not a lowered graph ({error})", where=where, todo=AGAIN) from error


class _Part(NamedTuple):
    """The CPU's target, or its draft: as it was, its graph, and as it is made anew."""

    given: GivenTarget
    graph: Graph
    target: CpuTarget


def _parts(artifact: Artifact, isa: Sequence[str] | None) -> list[_Part]:
    """Raises CompileError where the draft would work on blocks of other types than the target's."""
    (target,) = find_targets("cpu", isa)
    assert isinstance(target, CpuTarget)
    parts = [_part(artifact, artifact.cpu, target)]
    if artifact.cpu.draft is not None:
        parts.append(_part(artifact, artifact.cpu.draft, CpuDraft(target)))
        blocks = [[v.type for v in part.graph.inputs if isinstance(v.type, KV)] for part in parts]
        if blocks[0] != blocks[1]:
            where = f"{artifact.root.name}/{artifact.cpu.draft.graph}"
            raise CompileError("its KV blocks are not its target's", where=where, todo=AGAIN)
    return parts


def _part(artifact: Artifact, given: GivenTarget, target: CpuTarget) -> _Part:
    where = f"{artifact.root.name}/{given.graph}"
    return _Part(given, replanned(artifact.read(given.graph), artifact.manifest, where), target)


def replanned(text: bytes, model: Manifest, where: str) -> Graph:
    """The graph, its groups and buffers made anew. Raises CompileError where it could leave its arrays."""
    graph = parse(text.decode("utf-8"))
    verify(graph)
    _Bounds(graph, model, where).check()
    grouped = GroupPointwise().run(replace(graph, ops=tuple(map(_plain, graph.ops)), arena=())).graph
    planned = PlanMemory(device="cpu").run(grouped).graph
    verify(planned)
    return planned


def _plain(op: Op) -> Op:
    """Without what a pass noted on it."""
    return replace(op, attrs={key: value for key, value in op.attrs.items() if key not in ANNOTATIONS})


def _write(artifact: Artifact, parts: Sequence[_Part], writer: ArtifactWriter) -> Path:
    artifact.weights()  # there are some
    for part in parts:
        part.target.write_graph(part.graph, writer)
        part.target.generate(part.graph, writer)
        _copy_weights(artifact, part, writer)
    for name in artifact.manifest.tokenizer_files:
        writer.write(f"tokenizer/{Path(name).name}", artifact.read(name))
    for part in parts:
        part.target.build(writer, lambda done, total: None, default_cache())
    writer.seal(_manifest(artifact, parts))
    return writer.publish()


def _copy_weights(artifact: Artifact, part: _Part, writer: ArtifactWriter) -> None:
    """The packed weights, which must be those that the kernels generated here read."""
    source = artifact.path(part.given.weights or "")
    order = part.target.generated.weights
    found = tensor_bytes(source, [weight.name for weight in order])
    for weight, size in zip(order, found, strict=True):
        if size != weight.bytes:
            what = f"weight {weight.name!r} has {size:,} bytes, where its graph takes {weight.bytes:,}"
            raise CompileError(what, where=str(source), todo=AGAIN)
    shutil.copyfile(source, writer.path(part.target.weights))


def _entry(artifact: Artifact, parts: Sequence[_Part]) -> dict[str, Any]:
    """Of the CPU's target. What a draft's quantisation cost is known from before."""
    entry, *drafts = (part.target.entry(weights=True) for part in parts)
    if not drafts:
        return entry
    given = artifact.manifest.raw["targets"]["cpu"]["draft"]
    return {**entry, "draft": {"quantization": given.get("quantization"), **drafts[0]}}


def _manifest(artifact: Artifact, parts: Sequence[_Part]) -> dict[str, Any]:
    given, model = artifact.manifest.raw, artifact.manifest.model
    tokenizer = [f"tokenizer/{Path(name).name}" for name in artifact.manifest.tokenizer_files]
    return {
        "name": artifact.manifest.name,
        "made_by": {"octavo": manifest.octavo_version(), "rebuilt_from": artifact.manifest.digest},
        "source": {key: given["source"][key] for key in ("kind", "path")},
        "model": {
            "dtype": model.dtype,
            "vocab_size": model.vocab_size,
            "max_context": model.max_context,
            "bos_token_id": model.bos_token_id,
            "eos_token_ids": list(model.eos_token_ids),
            "frozen": given["model"]["frozen"],
        },
        "tokenizer": {"present": bool(tokenizer), "files": tokenizer},
        "kv_groups": manifest.kv_groups(parts[0].graph),
        "targets": {"cpu": _entry(artifact, parts)},
    }


class _Bounds:
    """What the verifier does not ask, as a graph of the compiler's own cannot be otherwise."""

    def __init__(self, graph: Graph, manifest: Manifest, where: str) -> None:
        self._graph, self._model, self._where = graph, manifest.model, where
        self._producers = graph.producers()

    def check(self) -> None:
        for name in (*self._graph.dims, *(v.name for v in self._graph.inputs)):
            if not (STEP_SIZES.fullmatch(name) or STEP_INPUTS.fullmatch(name)):
                self._fail(f"a step has no {name!r}")
        blocks = {v.type.block for v in self._graph.inputs if isinstance(v.type, KV)}
        if len(blocks) > 1 or blocks - set(BLOCKS):
            self._fail(f"blocks of {sorted(blocks)} tokens")
        width = tensor_of(self._graph.outputs[0]).shape[-1] if self._graph.outputs else None
        if width != self._model.vocab_size:
            self._fail(f"logits of {width} tokens, of a vocabulary of {self._model.vocab_size}")
        for op in self._graph.ops:
            self._check_op(op)

    def _check_op(self, op: Op) -> None:
        if op.kind in ("take", "embed"):
            table, index = op.args if op.kind == "take" else (op.args[1], op.args[0])
            rows = tensor_of(table).shape[op.attr("axis", 0)]
            if type(rows) is not int or self._most(index) >= rows:
                self._fail(f"an index may leave a table of {rows} rows", op)
        if op.kind == "paged_attention" and len(op.args) > 5 and any(op.args[5:]):
            self._fail("an attention with tables or sinks of its own", op)

    def _most(self, index: Any) -> int:
        """The largest value of an index: a token, a position, or one of them and a number."""
        if isinstance(index, Value) and index.name in ("ids", "pos"):
            return (self._model.vocab_size if index.name == "ids" else self._model.max_context) - 1
        op = self._producers.get(index.name) if isinstance(index, Value) else None
        if op is not None and op.kind in ("cast", "reshape"):
            return self._most(op.args[0])
        if op is not None and op.kind == "add" and isinstance(op.args[1], Scalar):
            shift = op.args[1].value
            if type(shift) is int and shift >= 0:
                return self._most(op.args[0]) + evaluate(shift, {})
        self._fail("an index is computed in a way whose largest value is not known", op)

    def _fail(self, what: str, op: Op | None = None) -> NoReturn:
        at = f", {op.kind} ({op.loc})" if op is not None else ""
        raise CompileError(f"not a graph that can be trusted: {what}", where=self._where + at, todo=AGAIN)
