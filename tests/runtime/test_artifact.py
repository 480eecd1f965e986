"""An artifact is loaded only if it is whole, safe and for this machine; refusals name the file or field."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

import runtime
from runtime import Artifact, ArtifactError, machine
from runtime.weights import Tensor, Weights
from tests.runtime import made


def test_a_good_one_opens(tmp_path):
    artifact = Artifact.open(made.write(tmp_path / "a.octavo"))
    assert artifact.manifest.model.eos_token_ids == (2,)
    assert artifact.manifest.kv_groups[0].block_bytes == 2048
    assert artifact.read("targets/cpu/graph.ir").startswith(b"graph")
    assert artifact.kernel().isa == "any"


def change(path, at=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", list(made.default_files()))
def test_a_changed_byte_is_found(tmp_path, name):
    made.write(tmp_path)
    change(tmp_path / name, -1)
    with pytest.raises(ArtifactError, match="SHA-256") as caught:
        Artifact.open(tmp_path)
    assert name in str(caught.value)
    if name.startswith("weights"):
        Artifact.open(tmp_path, verify="fast")
    else:
        with pytest.raises(ArtifactError, match="SHA-256"):
            Artifact.open(tmp_path, verify="fast")


def test_a_truncated_or_missing_file_is_found(tmp_path):
    made.write(tmp_path)
    weights = tmp_path / "weights/cpu.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match="bytes, the manifest says"):
        Artifact.open(tmp_path, verify="fast")
    weights.unlink()
    with pytest.raises(ArtifactError, match="No such file"):
        Artifact.open(tmp_path)


def drafting(tmp_path, **changes):
    files = made.default_files()
    raw = made.with_draft(files, **changes)
    return made.write(tmp_path / "d.octavo", files, raw)


@pytest.mark.parametrize("name", ["graph.ir", "plan.json", "kernels/forward.any.so", "weights.safetensors"])
def test_a_damaged_draft_is_found(tmp_path, name):
    path = drafting(tmp_path)
    assert Artifact.open(path).draft().weights == f"{made.DRAFT}/weights.safetensors"
    file = path / made.DRAFT / name
    change(file, -1)
    with pytest.raises(ArtifactError, match="SHA-256") as caught:
        Artifact.open(path)
    assert f"{made.DRAFT}/{name}" in str(caught.value)
    if name == "weights.safetensors":
        Artifact.open(path, verify="fast")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="bytes, the manifest says") as caught:
        Artifact.open(path, verify="fast")
    assert f"{made.DRAFT}/{name}" in str(caught.value)
    file.unlink()
    with pytest.raises(ArtifactError, match="No such file") as caught:
        Artifact.open(path, verify="fast")
    assert f"{made.DRAFT}/{name}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft": {}}, "null: it is one itself"),
        ({"weights": None}, "a path where its target has one"),
        ({"weights": "../w"}, "leaves the artifact"),
        ({"graph": 3}, "targets.cpu.draft: 'graph' must be"),
        ({"kernels": None}, "targets.cpu.draft: 'kernels' must be"),
    ],
)
def test_a_strange_draft_is_refused(tmp_path, changes, said):
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(drafting(tmp_path, **changes))


def test_an_artifact_without_a_draft_says_how_to_get_one(tmp_path):
    path = made.write(tmp_path / "a.octavo")
    for ask in (Artifact.open(path).draft, lambda: runtime.load(path, draft="self")):
        with pytest.raises(ArtifactError, match="no draft of its own.*octavo compile --draft self:int4"):
            ask()


def test_a_draft_runs_at_its_targets_level_or_at_its_best(tmp_path):
    have = {"arch": os.uname().machine, "features": [], "file": "targets/cpu/graph.ir"}
    kernels = [{**have, "isa": name} for name in ("best", "any")]
    artifact = Artifact.open(drafting(tmp_path, kernels=kernels))
    assert artifact.draft_kernel("any").isa == "any"
    assert artifact.draft_kernel("other").isa == artifact.draft_kernel().isa == "best"


def test_digest_from_outside(tmp_path):
    made.write(tmp_path)
    digest = json.loads((tmp_path / "manifest.json").read_text())["digest"]
    Artifact.open(tmp_path, digest=digest)
    Artifact.open(tmp_path, digest=digest.removeprefix("sha256:"))
    with pytest.raises(ArtifactError, match="not the given"):
        Artifact.open(tmp_path, digest="0" * 64)


def test_a_changed_manifest_is_found(tmp_path):
    made.write(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"vocab_size": 97', '"vocab_size": 98'))
    with pytest.raises(ArtifactError, match="its digest is"):
        Artifact.open(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"format": NaN}', "NaN is not JSON"),
        (b"[]", "expected an object"),
        (b"{}", "'format' is missing"),
        (b'{"format": "octavo", "version": 9, "version": 1}', "a key occurs twice among"),
        (b'{"format": "gguf"}', "must be 'octavo'"),
        (b'{"format": "octavo", "version": 4}', "format version 4; .* reads 1, 2 and 3.*or compile"),
        (b'{"format": "octavo", "version": true}', "must be an integer"),
        (b'{"format": "octavo", "version": 1, "digest": "x"}', "its digest is"),
        (b'{"format": "octavo", "version": 1, "name": "\\ud800"}', "cannot be hashed"),
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path, data, said):
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(tmp_path)


def kv_group(tail: bool, block_bytes: int, dtypes: str, pers: str, per_token: float) -> dict[str, object]:
    """Of one layer; k and v have 2 heads of 24."""
    streams = [
        {"name": n, "dtype": dtype, "per": per, "heads": 2, "head_size": 24}
        for n, dtype, per in zip("kv", dtypes.split(), pers.split(), strict=True)
    ]
    rest = {"bytes_per_token": per_token, "block_bytes": block_bytes, "streams": streams}
    return {"layers": 1, "window": None, "tail": tail, "block": 16} | rest


# k: 16 tokens, 2 heads of 24 filled up to 32 codes of half a byte, 2 f16 numbers per channel: 512 + 192 bytes
# v: the same codes, and 2 f16 numbers per token and head: 512 + 128. Together 1,344, 84 a token
PACKED = kv_group(False, 1344, "u4 u4", "channel token", 84)
TAIL = kv_group(True, 3072, "bf16 bf16", "token token", 192)


def test_groups_of_codes_have_scales_and_tails(tmp_path):
    codes = kv_group(False, 16 * 2 * 2 * (24 + 2), "i8 f8e4m3", "token token", 104)
    raw = made.manifest(made.default_files(), kv_groups=[PACKED, codes, TAIL])
    found = Artifact.open(made.write(tmp_path / "a", raw=raw)).manifest.kv_groups
    assert [(g.tail, g.bytes_per_token, g.block_bytes) for g in found] == [
        (False, 84, 1344), (False, 104, 1664), (True, 192, 3072),
    ]  # fmt: skip
    for groups in ([PACKED], [PACKED, TAIL, TAIL], [codes, TAIL]):
        raw = made.manifest(made.default_files(), kv_groups=groups)
        with pytest.raises(ArtifactError, match="a tail for each group"):
            Artifact.open(made.write(tmp_path / "b", raw=raw))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([TAIL, PACKED], "tails after all others"),
        ([PACKED, TAIL | {"window": 3}], "null: it is a tail"),
        ([PACKED, kv_group(True, 1664, "i8 i8", "token token", 104)], "of plain elements"),
        ([PACKED | {"tail": True}], "a tail for each group"),
        ([PACKED, TAIL | {"layers": 2, "bytes_per_token": 384, "block_bytes": 6144}], "a tail for each"),
        ([kv_group(False, 1728, "i8 i8", "channel token", 108), TAIL], "u4 and u2 alone share scales"),
        ([PACKED | {"block": 8, "bytes_per_token": 104, "block_bytes": 832}, TAIL], "strips of 16 tokens"),
    ],
)  # fmt: skip
def test_a_tail_is_of_one_group_and_plain(tmp_path, groups, said):
    raw = made.manifest(made.default_files(), kv_groups=groups)
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(made.write(tmp_path, raw=raw))


def test_a_version_without_tails_is_read(tmp_path):
    raw = made.manifest(made.default_files(), version=1)
    assert not Artifact.open(made.write(tmp_path, raw=raw)).manifest.kv_groups[0].tail


# 2 layers of 4 + 6 + 2 numbers of f32 for each of 16 tokens, and a state of 2 heads of 12 for all of them
STREAMS = [
    {"name": name, "dtype": "f32", "per": "token", "heads": heads, "head_size": size}
    for name, heads, size in (("key", 1, 4), ("value", 2, 3), ("decay", 2, 1))
]
BEFORE = {"name": "state", "dtype": "f32", "per": "block", "heads": 2, "head_size": 12}
STATE = {
    "layers": 2,
    "window": None,
    "tail": False,
    "state": True,
    "block": 16,
    "bytes_per_token": 0,
    "block_bytes": 1728,  # 2 * 4 * (16 * 12 + 24)
    "streams": [*STREAMS, BEFORE],
}


def test_a_state_takes_no_bytes_for_a_token(tmp_path):
    raw = made.manifest(made.default_files(), version=3, kv_groups=[PACKED, STATE, TAIL])
    found = Artifact.open(made.write(tmp_path, raw=raw)).manifest.kv_groups
    assert [(g.state, g.tail, g.bytes_per_token, g.block_bytes) for g in found] == [
        (False, False, 84, 1344), (True, False, 0, 1728), (False, True, 192, 3072),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": False}, "without one per block"),
        ({"state": 1}, "'state' must be true or false"),
        ({"tail": True}, "'tail' must be false: it is a state"),
        ({"window": 9}, "'window' must be null: it is a state"),
        ({"bytes_per_token": 108}, "'bytes_per_token' must be 0"),
        ({"block_bytes": 1664}, "'block_bytes' must be an integer from 1728"),
        ({"streams": STREAMS}, "with one per block: it is a state"),
        ({"streams": [*STREAMS, BEFORE, BEFORE]}, "with one per block: it is a state"),
        ({"streams": [*STREAMS, BEFORE | {"dtype": "bf16"}]}, "'dtype' must be f32"),
        ({"streams": [STREAMS[0] | {"per": "channel"}, BEFORE]}, "u4 and u2 alone"),
    ],
)
def test_a_state_is_plain_and_its_own(tmp_path, change, said):
    raw = made.manifest(made.default_files(), version=3, kv_groups=[STATE | change])
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(made.write(tmp_path, raw=raw))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("model.vocab_size", 0),
        ("model.vocab_size", 97.0),
        ("model.vocab_size", True),
        ("model.max_context", -1),
        ("model.eos_token_ids", [97]),
        ("model.eos_token_ids", None),
        ("model.bos_token_id", "1"),
        ("model", 3),
        ("model.frozen", None),
        ("made_by", []),
        ("source", "here"),
        ("source.kind", None),
        ("kv_groups.0.streams", None),
        ("kv_groups.0.streams", []),
        ("kv_groups.0.layers", 2**20),
        ("kv_groups.0.bytes_per_token", 127),
        ("kv_groups.0.streams.0.dtype", "f8"),
        ("kv_groups.0.streams.0.dtype", "i8"),  # bytes of f32
        ("kv_groups.0.streams.0.per", "block"),
        ("kv_groups.0.tail", 1),
        ("kv_groups.0.tail", True),  # of no group
        ("kv_groups.0.streams.0.head_size", 16),
        ("kv_groups.0.streams.0.heads", "1"),
        ("kv_groups", {}),
        ("kv_groups.0.block", 0),
        ("kv_groups.0.block_bytes", 1024),
        ("kv_groups.0.block_bytes", 2049),
        ("kv_groups.0.window", 0),
        ("targets", {}),
        ("targets.cpu.kernels.0.features", [1]),
        ("targets.cpu.kernels.0.file", "/etc/passwd"),
        ("targets.cpu.weights", "weights/../../x"),
        ("targets.cpu.plan", "a\\b"),
        ("targets.cpu.plan", "a//b"),
        ("files", {"../x": {"bytes": 1, "sha256": "0" * 64}}),
        ("files", {"a": {"bytes": 1, "sha256": "xyz"}}),
        ("files", {"a": {"bytes": -1, "sha256": "0" * 64}}),
    ],
)
def test_a_wrong_field_is_named(tmp_path, at, value):
    raw = made.manifest(made.default_files())
    *path, last = [int(p) if p.isdigit() else p for p in at.split(".")]
    place = raw
    for part in path:
        place = place[part]
    place[last] = value
    made.write(tmp_path, raw=raw)
    with pytest.raises(ArtifactError, match=at.split(".")[0]):
        Artifact.open(tmp_path)


def with_gpu(root, **options):
    files = made.default_files()
    raw = made.with_gpu(files, **options)
    return made.write(root, files, raw)


def test_targets_are_found_by_name(tmp_path):
    artifact = Artifact.open(with_gpu(tmp_path))
    gpu = artifact.target("cuda:sm_90")
    assert (gpu.backend, gpu.arch, gpu.weight_order) == ("cuda", "sm_90", ("w1", "w0"))
    assert artifact.read(gpu.plan) == b"content of plan.json"
    assert artifact.target("cpu") is artifact.cpu
    with pytest.raises(
        ArtifactError, match=r"no target 'hip:gfx942' \(built: cpu, cuda:sm_90\).*compile the model for one"
    ):
        artifact.target("hip:gfx942")


@pytest.mark.parametrize("name", ["kernels/norm.0.cubin", "kernels.json", "plan.json", "kernels/kernels.py"])
def test_a_changed_byte_of_a_gpu_target_is_found(tmp_path, name):
    with_gpu(tmp_path)
    change(tmp_path / made.FOLDER / name)
    with pytest.raises(ArtifactError, match="SHA-256") as caught:
        Artifact.open(tmp_path, verify="fast")
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["weights/cpu.safetensors", "weights/gpu.safetensors"])
def test_no_targets_weights_are_hashed_in_a_fast_check(tmp_path, name):
    with_gpu(tmp_path)
    change(tmp_path / name, -1)
    Artifact.open(tmp_path, verify="fast")
    with pytest.raises(ArtifactError, match="SHA-256"):
        Artifact.open(tmp_path)


def test_shapes_alone_have_no_weights_to_load(tmp_path):
    artifact = Artifact.open(with_gpu(tmp_path, weights=None))
    assert artifact.weights("cpu") == "weights/cpu.safetensors"
    with pytest.raises(ArtifactError, match="no weights.*without --no-weights"):
        artifact.weights("cuda:sm_90")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "metal"),
        ("backend", None),
        ("arch", 90),
        ("arch", ""),
        ("arch", "sm_"),
        ("arch", "sm_9x"),
        ("arch", "gfx942"),
        ("arch", "../sm_90"),
        ("graph", "../graph.ir"),
        ("plan", None),
        ("kernels", "/kernels.json"),
        ("source", ["kernels.py"]),
        ("weights", "weights//gpu"),
        ("weight_order", [1]),
        ("invariant", 0),
        ("built_by", None),
        ("built_by", {"triton": 3.9}),
    ],
)
def test_a_wrong_field_of_a_gpu_target_is_named(tmp_path, field, value):
    files = made.default_files()
    raw = made.with_gpu(files)
    raw["targets"]["cuda:sm_90"][field] = value
    made.write(tmp_path, files, raw)
    with pytest.raises(ArtifactError, match=rf"{field}.*targets.cuda:sm_90|targets.cuda:sm_90.*{field}"):
        Artifact.open(tmp_path)


def test_a_target_has_a_plain_name(tmp_path):
    files = made.default_files()
    raw = made.with_gpu(files)
    raw["targets"]["cuda\n"] = raw["targets"]["cuda:sm_90"]
    made.write(tmp_path, files, raw)
    with pytest.raises(ArtifactError, match="must be called by letters"):
        Artifact.open(tmp_path)


def test_symbolic_links_are_refused(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(made.default_files()["targets/cpu/graph.ir"])
    root = made.write(tmp_path / "a.octavo")
    (root / "targets/cpu/graph.ir").unlink()
    os.symlink(outside, root / "targets/cpu/graph.ir")
    with pytest.raises(ArtifactError, match="symbolic link"):
        Artifact.open(root)
    (root / "targets").rename(tmp_path / "moved")
    os.symlink(tmp_path / "moved", root / "targets")
    with pytest.raises(ArtifactError, match="symbolic link"):
        Artifact.open(root)


def test_only_listed_files_are_read(tmp_path):
    artifact = Artifact.open(made.write(tmp_path))
    (tmp_path / "extra").write_bytes(b"x")
    for name in ("extra", "manifest.json", "../x"):
        with pytest.raises(ArtifactError, match="not in the manifest's list"):
            artifact.read(name)


@pytest.mark.parametrize(
    ("path", "said"), [("none", "does not exist"), ("file", "not a dir"), ("", "no manifest")]
)
def test_what_is_no_artifact(tmp_path, path, said):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match=said):
        Artifact.open(tmp_path / path)


def kernels(tmp_path, *entries):
    raw = made.manifest(made.default_files())
    (base,) = raw["targets"]["cpu"]["kernels"]
    raw["targets"]["cpu"]["kernels"] = [base | dict(isa=isa, features=f, arch=a) for isa, f, a in entries]
    return Artifact.open(made.write(tmp_path, raw=raw))


def test_the_first_kernel_that_fits_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset({"avx2", "fma", "avx512vnni"}))
    here = machine.arch()
    artifact = kernels(
        tmp_path,
        ("v4", ["avx2", "avx512f"], here),
        ("arm", [], "other"),
        ("v3", ["avx2", "fma"], here),
        ("base", [], here),
    )
    assert artifact.kernel().isa == "v3" and artifact.kernel("base").isa == "base"
    with pytest.raises(ArtifactError, match="v4 needs avx512f"):
        artifact.kernel("v4")
    with pytest.raises(ArtifactError, match="no kernel v9"):
        artifact.kernel("v9")


def test_missing_features_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset({"avx512f"}))
    artifact = kernels(tmp_path, ("v4", ["avx512f", "avx512_vnni"], machine.arch()), ("neon", [], "other"))
    with pytest.raises(ArtifactError, match="v4 needs avx512_vnni; neon needs other"):
        artifact.kernel()


def test_weights_are_found_by_name_and_aligned(tmp_path):
    path = tmp_path / "w"
    for pad in (64, 1):  # what the file does not align is copied
        path.write_bytes(made.safetensors(made.WEIGHTS, pad))
        weights = Weights(path, ["w0", "w1"])
        assert all(address % 64 == 0 for address in weights.addresses)
        for tensor, name in zip(weights.tensors, ("w0", "w1"), strict=True):
            assert tensor.view(np.float32).tolist() == made.WEIGHTS[name].ravel().tolist()
        weights.close()


@pytest.mark.parametrize(
    ("order", "read", "said"),
    [
        (["w1", "w0"], {"w0": (5,), "w1": (3, 16)}, r"weight_order\[0\] is 'w1'; .*reads 'w0'"),
        (["w0", "w1"], {"w0": (5,)}, "weight_order has 2 names; the compiled code reads 1 tensors"),
        (["w0"], {"w0": (5,), "w1": (3, 16)}, "weight_order has 1 names; the compiled code reads 2"),
        (["w0", "w1"], {"w0": (5,), "w1": (4, 16)}, r"'w1' is F32\[3, 16\]; .*reads F32\[4, 16\]"),
        (["w0", "w1"], {"w0": (6,), "w1": (3, 16)}, r"'w0' is F32\[5\]; the compiled code reads F32\[6\]"),
    ],
)  # fmt: skip
def test_weights_are_those_that_the_code_reads(tmp_path, order, read, said):
    (tmp_path / "w").write_bytes(made.safetensors(made.WEIGHTS))
    right = [Tensor("w0", "F32", (5,)), Tensor("w1", "F32", (3, 16))]
    Weights(tmp_path / "w", ["w0", "w1"], right).close()
    with pytest.raises(ArtifactError, match=said):
        Weights(tmp_path / "w", order, [Tensor(name, "F32", shape) for name, shape in read.items()])


def header(**tensors) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def tensor(offsets, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "too short"),
        (b"\xff" * 8, "a header of"),
        ((100).to_bytes(8, "little") + b"{}", "a header of 100 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "expected an object"),
        (header(), "2 tensors are missing, the first is 'w0'"),
        (header(w0={}, w1={}), "'data_offsets' is missing"),
        *[
            (header(w0=tensor(offsets), w1=tensor([0, 4])), "data_offsets")
            for offsets in ([0, 65], [-4, 4], [8, 4], [0], [0, 2**70], ["0", "4"], 3, [4, 7], [4, 12])
        ],
        (header(w0=tensor([2, 6]), w1=tensor([0, 4])), "'w1' and 'w0' overlap"),
        (header(w0=tensor([4, 8], dtype="F31"), w1=tensor([0, 4])), "'dtype' must be one of"),
        (header(w0=tensor([4, 8], shape=[-1]), w1=tensor([0, 4])), "'shape' must be a list of sizes"),
        (header(w0=tensor([4, 8], shape=[2**62, 2**62]), w1=tensor([0, 4])), "bytes apart"),
    ],
)
def test_malformed_weights_are_refused(tmp_path, data, said):
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(ArtifactError, match=said):
        Weights(tmp_path / "w", ["w0", "w1"])
