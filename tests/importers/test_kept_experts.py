"""Experts that a checkpoint has quantised, one by one or as stacks, stay the codes that they are.

What other packages unpack is in tests/data/quantized.safetensors (test_quantized); of GGUF it is the gguf
package that dequantises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file

from compiler.importers import Imported, ImportRefused, load
from compiler.importers.arrangement import Rows
from compiler.importers.quantized.joined import Joined, Unlike, joined
from compiler.importers.quantized.matrix import ZERO, Matrix, float_rows
from ir.graph import Weight
from ir.ops.quantize import dequantize
from ir.types import DType
from tests.importers import test_gguf_architectures, test_quantized
from tests.importers.compare import TOLERANCE, worst
from tests.importers.test_experts import build
from tests.importers.test_quantized_models import GPTQ, kinds, words
from tests.model import tiny
from tests.model.forced import tokens
from tests.model.harness import Stepper

E = 5
W = ("w1", "w2", "w3")
EXPERT = "model.layers.0.block_sparse_moe.experts.{}.{}"
UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
Made = tuple[Path, Any, dict[str, Any]]  # what `mixtral` gives


def as_one(rows: list[Rows], matrices: dict[str, Matrix | None]) -> Joined | None:
    return joined(rows, matrices.__getitem__)


@pytest.mark.parametrize("case", [c for c in test_quantized.CONFIGS if "order" not in c])
def test_rows_of_several_are_those_of_the_packer(case: str) -> None:
    matrix, want = test_quantized.matrix(case), test_quantized.expected(case)
    found = as_one([Rows("a", 0, len(want)), Rows("b", 3, 12), Rows("a", 7, 8)], {"a": matrix, "b": matrix})
    assert found is not None and found.grid == replace(matrix.grid, shape=(len(want) + 10, want.shape[1]))
    places = np.r_[: len(want), 3:12, 7:8]
    for lo, hi in ((0, len(places)), (len(want) - 1, len(want) + 4), (len(want), len(want)), (2, 5)):
        for part, kind in found.grid.parts():
            rows = found.rows(part, lo, hi)
            whole = matrix.rows(part, 0, len(want))
            assert rows.dtype == kind.dtype.numpy and rows.tobytes() == whole[places[lo:hi]].tobytes(), part
        if not case.endswith("bf16"):
            assert np.array_equal(float_rows(found, lo, hi), want[places[lo:hi]])


def test_zeros_of_several_where_one_has_a_number_for_all() -> None:
    cases = {"a": "gptq-4-sym", "b": "gptq-4"}
    found = as_one([Rows(n, 0, 32) for n in "ab"], {n: test_quantized.matrix(c) for n, c in cases.items()})
    assert found is not None and found.grid.zeros is DType.U4 and (found.rows(ZERO, 0, 32) == 8).all()
    want = np.concatenate([test_quantized.expected(c) for c in cases.values()])
    assert np.array_equal(float_rows(found, 0, 64), want)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("gptq-4-order", "act-order"),
        (
            "gptq-4-row",
            "'b' is u4 of 64 columns with scales of f16, and another beside it u4 in groups of 32",
        ),
        ("gptq-8", "'b' is i8 in groups of 32"),
        ("packed-4", "scales of f32, and another"),
        (None, "'b' is not quantised, and others beside it are"),
    ],
)
def test_matrices_that_cannot_be_one(case: str | None, why: str) -> None:
    other = None if case is None else test_quantized.matrix(case)
    with pytest.raises(Unlike, match=why):
        as_one([Rows("a", 0, 4), Rows("b", 0, 4)], {"a": test_quantized.matrix("gptq-4"), "b": other})
    assert as_one([Rows("b", 0, 4)], {"b": None}) is None


def packed(codes: Any, zeros: Any, scales: Any) -> dict[str, Any]:
    """What GPTQ stores of codes [N,K] in groups of 16, in words of eight."""
    zeros = np.pad(zeros.T - 1, ((0, 0), (0, -len(zeros) % 8)))
    return {"qweight": words(codes).T, "qzeros": words(zeros), "scales": scales.T}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A directory with GPTQ's codes of all experts, the model of floats, and the codes of each matrix.

    Experts of odd numbers have one zero for all groups.
    """
    folder, model, rng = (
        tmp_path_factory.mktemp("mixtral"),
        build("mixtral", num_hidden_layers=1),
        np.random.default_rng(5),
    )
    model.save_pretrained(folder)
    tensors, codes = load_file(folder / "model.safetensors"), dict[str, Any]()
    for name in [n for n in tensors if ".experts." in n]:
        module, (rows, width) = name.removesuffix(".weight"), tensors[name].shape
        codes[name] = q = rng.integers(0, 16, (rows, width)).astype(np.uint8)
        groups = rows, width // 16
        zeros = rng.integers(1, 16, groups) if int(module.split(".")[-2]) % 2 == 0 else np.full(groups, 8)
        scales = rng.uniform(0.01, 0.05, groups).astype(np.float16)
        stored = packed(q, zeros, scales)
        tensors |= {f"{module}.{p}": torch.tensor(np.ascontiguousarray(a)) for p, a in stored.items()}
        floats = (q - zeros.repeat(16, 1).astype(np.float32)) * scales.astype(np.float32).repeat(16, 1)
        tensors[name] = torch.tensor(floats)
    experts = model.model.layers[0].mlp.experts
    of = {w: [tensors.pop(EXPERT.format(e, f"{w}.weight")) for e in range(E)] for w in W}
    experts.gate_up_proj.data = torch.stack(
        [torch.cat(pair) for pair in zip(of["w1"], of["w3"], strict=True)]
    )
    experts.down_proj.data = torch.stack(of["w2"])
    write(folder, tensors)
    return folder, model, codes


def write(folder: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = GPTQ | {"group_size": 16}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def parts(imported: Imported) -> Iterator[str]:
    return (w.name for w in imported.graph.weights if w.name.endswith(".q"))


def test_stacks_of_experts_hold_the_codes_of_each(mixtral: Made) -> None:
    folder, model, codes = mixtral
    found = load(folder, keep_grid=True)
    assert found.notes == () and found.info.unused == ()
    assert list(parts(found)) == [f"{stack}.q" for stack in (UP, DOWN)]
    of = {w: [codes[EXPERT.format(e, f"{w}.weight")] for e in range(E)] for w in W}
    both = [half for pair in zip(of["w1"], of["w3"], strict=True) for half in pair]
    assert np.array_equal(found.weights.read(f"{UP}.q"), np.concatenate(both))
    assert np.array_equal(found.weights.read(f"{DOWN}.q"), np.concatenate(of["w2"]))
    assert worst(found, model, 17, tiny.VOCAB) <= TOLERANCE


def test_compiled_they_are_the_floats_that_codes_stand_for(mixtral: Made, tmp_path: Path) -> None:
    folder, model, _ = mixtral
    path = tiny.compiled(folder, tmp_path / "m.octavo", quantize="own", activations="none")
    stepper = Stepper(path, tiny.CONTEXT)
    found = kinds(stepper.graph)
    assert found.count("qmoe_linear") == 2 and not {"moe_linear", "dequantize"} & set(found)
    expected = tiny.reference_logits(model, tokens(17)).numpy()
    assert np.abs(stepper.logits(tokens(17)) - expected).max() <= 1e-4 * expected.std()


def test_a_stack_of_several_formats_is_read_as_floats_which_is_said(mixtral: Made, tmp_path: Path) -> None:
    folder, model, _ = mixtral
    tensors, name = load_file(folder / "model.safetensors"), EXPERT.format(3, "w2")
    for part in ("qweight", "qzeros", "scales"):
        tensors.pop(f"{name}.{part}")
    tensors[f"{name}.weight"] = model.model.layers[0].mlp.experts.down_proj.data[3].contiguous()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    write(tmp_path, tensors)
    found = load(tmp_path, keep_grid=True)
    assert list(parts(found)) == [f"{UP}.q"] and found.info.unused == ()
    why = f"{name + '.weight'!r} is not quantised, and others beside it are"
    assert found.notes == (f"1 array of quantised matrices is read as floats: of {DOWN!r} {why}",)
    assert worst(found, model, 17, tiny.VOCAB) <= TOLERANCE


def test_nothing_that_can_be_kept_is_refused_with_the_reason(mixtral: Made, tmp_path: Path) -> None:
    folder, _, _ = mixtral
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("qweight")]:
        groups = np.random.default_rng(len(name)).permutation(np.arange(8 * len(tensors[name])) // 16)
        tensors[name.replace("qweight", "g_idx")] = torch.tensor(groups, dtype=torch.int32)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    write(tmp_path, tensors)
    with pytest.raises(ImportRefused, match=r"of its own; 2 arrays .* read as floats: .*\(act-order\)"):
        load(tmp_path, keep_grid=True)


FORMS = (
    {"ffn_gate_exps": Quant.Q8_0, "ffn_up_exps": Quant.Q4_1, "ffn_down_exps": Quant.Q6_K},
    {"ffn_gate_exps": Quant.Q4_0, "ffn_up_exps": Quant.Q4_0, "ffn_down_exps": Quant.Q4_K},
)  # of each layer


def test_a_gguf_files_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates and ups are tensors of their own, in one layer of two formats; the router is quantised too."""
    add, values = gguf.GGUFWriter.add_tensor, dict[str, Any]()

    def quantised(writer: Any, name: str, array: Any) -> None:
        _, layer, part = (*name.split("."), "", "")[:3]
        form = (FORMS[int(layer)] | {"ffn_gate_inp": Quant.Q8_0}).get(part) if "blk." in name else None
        if form is None:
            add(writer, name, array)
            return
        rng, (size, count) = np.random.default_rng(len(values)), (gguf.GGML_QUANT_SIZES[form][1], array.size)
        block = gguf.GGML_QUANT_SIZES[form][0]
        data = rng.integers(0, 256, (count // block, size), np.uint8)
        for at in {Quant.Q6_K: (208,), Quant.Q4_0: (0,), Quant.Q8_0: (0,)}.get(form, (0, 2)):
            data[:, at : at + 2] = rng.uniform(1e-4, 4e-4, (len(data), 1)).astype(np.float16).view(np.uint8)
        data = data.reshape(*array.shape[:-1], -1)
        values[name.removesuffix(".weight")] = gguf.dequantize(data, form).reshape(array.shape)
        add(writer, name, data, raw_dtype=form)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantised)
    found = load(
        test_gguf_architectures.write(tmp_path / "m.gguf", "qwen3moe"), max_context=64, keep_grid=True
    )
    note = f"1 array of quantised matrices is read as floats: of {UP!r} 'blk.0.ffn_up_exps.weight' is u4 in"
    assert len(found.notes) == 1 and found.notes[0].startswith(note)
    for layer in range(2):
        up, down, router = (
            n.replace(".0.", f".{layer}.") for n in (UP, DOWN, "model.layers.0.mlp.gate.weight")
        )
        of = {key.split(".")[2]: array for key, array in values.items() if key.startswith(f"blk.{layer}")}
        both = np.concatenate([of["ffn_gate_exps"], of["ffn_up_exps"]], 1)
        array = kept(found, up) if layer else found.weights.read(up)
        assert np.array_equal(array.reshape(both.shape), both)
        assert np.array_equal(kept(found, down).reshape(of["ffn_down_exps"].shape), of["ffn_down_exps"])
        assert np.array_equal(kept(found, router), of["ffn_gate_inp"])


def kept(imported: Imported, name: str) -> Any:
    """What the codes of a matrix stand for."""
    (op,) = (op for op in imported.graph.ops if op.kind == "dequantize" and op.out.name == name)
    q, scale, *offset = (imported.weights.read(a.name) for a in op.args if isinstance(a, Weight))
    return dequantize(q, scale, op.attr("zero"), offset[0] if offset else None, op.attr("group_size"))
