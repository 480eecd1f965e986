"""Binaries of linears of several experts, built without a device: no spills, within shared memory, on the
matrix units. Each target builds one linear of floats and one of codes: the tile of one pair, and the largest.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.cache import Cache
from codegen.triton import Device, find_device, generate
from codegen.triton.build import BuiltKernel, build_kernels
from codegen.triton.devices import DEVICES
from codegen.triton.launch import Kernel
from ir.types import DType
from tests.codegen.harness import lower
from tests.triton.test_experts import CASES as SMALL
from tests.triton.test_experts import Case, graph, quantised

BF16, I8, U4, F8 = DType.BF16, DType.I8, DType.U4, DType.F8E4M3
GPUS = [device for device in DEVICES if not device.interpreted]
UP = Case(128, 8, 768, 2048, x=BF16, w=BF16, out=BF16, gated=True, activation="silu")
DOWN = Case(8, 2, 4096, 14336, x=BF16, w=BF16, each=True, bias=True)
CASES = {
    "up": UP,
    "down": DOWN,
    "up f32": Case(8, 2, 1536, 576, gated=True, activation="silu"),
    "up u4": replace(UP, codes=quantised(U4, 64, offset=True)),
    "down u4": replace(DOWN, codes=quantised(U4, 32, 8)),
    "up i8 by u4": replace(UP, codes=quantised(U4, 32, U4, x_dtype=I8)),
    "up f8 by f8": replace(UP, codes=quantised(F8, 0, x_dtype=F8, x_group=0)),
}
BUILT = [
    # (target, its linears, matrix instructions of tiles of 16 rows, of larger ones)
    ("cuda:sm_80", ("up f32", "up i8 by u4"), "mma", "mma"),
    ("cuda:sm_90", ("down", "up f8 by f8"), "mma", "wgmma"),
    ("cuda:sm_100", ("up", "down u4"), "mma", "tcgen05"),
    ("hip:gfx942", ("down", "up u4"), "mfma", "mfma"),
]


def build(names: tuple[str, ...], device: Device, directory: Path) -> list[BuiltKernel]:
    generated = generate(lower(graph({name: CASES[name] for name in names}), "gpu"), device)
    (directory / "kernels").mkdir()
    (directory / "kernels/kernels.py").write_text(generated.source)
    found = sorted((k for k in generated.kernels if "BLOCK_M" in dict(k.constants)), key=elements)
    moe = [k for k in found if "moe_linear" in k.function]
    direct = [k for k in moe if "direct" in k.function]
    listed = [k for k in moe if "direct" not in k.function]
    largest = {re.sub(r"_\d+$", "", k.function): k for k in listed}  # the last of each
    lists = [k for k in generated.kernels if k.function == "pair_lists"]
    chosen = [*direct, *largest.values(), *lists]
    return build_kernels(directory, chosen, device, cache=Cache(directory / "cache"))


def elements(kernel: Kernel) -> tuple[int, int]:
    tile = dict(kernel.constants)
    return int(tile["BLOCK_M"]), int(tile["BLOCK_N"])


@pytest.mark.parametrize(("target", "names", "few", "many"), BUILT, ids=[b[0] for b in BUILT])
def test_kernels_fit_the_device_and_use_its_matrix_units(
    target: str, names: tuple[str, ...], few: str, many: str, tmp_path: Path
) -> None:
    device, units = find_device(target), set[str]()
    for built in build(names, device, tmp_path):
        assert built.spills == 0, built
        assert built.shared_bytes <= device.shared_bytes, built
        if built.kernel.function == "pair_lists":
            continue
        rows, _ = elements(built.kernel)
        assert (rows == 16) == built.kernel.function.endswith("direct")
        assert set(built.matrix or {}) == {few if rows == 16 else many}, built
        units |= set(built.matrix or {})
    assert units == {few, many}


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.target)
@pytest.mark.parametrize("name", [*CASES, *(n for n, c in SMALL.items() if c.slots > 1)])
def test_steps_of_any_size_have_a_tile_and_few_pairs_need_no_lists(device: Device, name: str) -> None:
    case = (CASES | SMALL)[name]
    plan = generate(lower(graph({name: case}), "gpu"), device).plan
    (entry,) = [e for e in plan["sections"]["forward"] if "moe_linear" in e["op"]]
    bounds = [c["when"] and c["when"][1] for c in entry["cases"]]
    assert bounds[0] >= case.slots and bounds == sorted(set(bounds[:-1])) + [None]
    lists = [any("pair_lists" in x["kernel"] for x in c["launches"]) for c in entry["cases"]]
    assert lists == [False, *[True] * (len(lists) - 1)]
    assert {c["when"][0][2] if c["when"] else "T" for c in entry["cases"]} == {"T"}
