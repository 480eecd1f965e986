"""Sums of integer products are exact: at this machine's levels, and at those of AVX-512 by emulation.

Codes and x are the largest that there are, of either sign, so that a sum that saturates or wraps differs.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from codegen import cpp
from tests.codegen.harness import level, levels, pointer

ROWS, BLOCK = 3, 32
SOURCE = """
#include "qdot.h"
using namespace octavo;
// sums [ROWS][16] of a block of 32: codes [8][16][4], x [8][ROWS][4], pairs [2][ROWS] of sums of x.
template <Codes Q>
static void block(const int8_t* codes, const int8_t* x, const int32_t* pairs, int32_t zero, int32_t* out) {
  int32_t start[ROWS];
  for (int r = 0; r < ROWS; r++) start[r] = start_of<Q>(zero, pairs[r], pairs[ROWS + r]);
  BlockSums<Q, ROWS> sums(start);
  for (int q = 0; q < 8; q++) {
    nb w[NV];
    EACH(NV) w[i] = load_bytes(codes + q * 64 + i * sizeof(nb));
    sums.add(w, x + q * ROWS * 4);
  }
  for (int r = 0; r < ROWS; r++) EACH(NV) {
    ni found = sums.of(r, i);
    memcpy(out + r * 16 + i * LANES, &found, sizeof found);
  }
}
extern "C" __attribute__((visibility("default")))
void run(int u4, const int8_t* codes, const int8_t* x, const int32_t* pairs, int32_t zero, int32_t* out) {
  if (u4) block<Codes::U4>(codes, x, pairs, zero, out);
  else block<Codes::I8>(codes, x, pairs, zero, out);
}
"""


def build(isa: str, folder: Path) -> ctypes.CDLL:
    """Without optimisation. isa: a level, or "emulated" or "emulated-vnni"."""
    (folder / "qdot.cpp").write_text(SOURCE.replace("ROWS", str(ROWS)))
    emulated = isa.startswith("emulated")
    flags = ["-include", str(Path(__file__).with_name("emulated.h")), "-Wno-psabi"] if emulated else []
    flags += ["-DEMULATE_VNNI"] if isa == "emulated-vnni" else []
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", *(level("baseline") if emulated else level(isa)).flags,
         *flags, f"-I{cpp.INCLUDE}", "-o", str(folder / "qdot.so"), str(folder / "qdot.cpp")],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(folder / "qdot.so"))


@pytest.mark.parametrize("isa", [*levels(), "emulated", "emulated-vnni"])
def test_sums_of_a_block_are_exact(isa: str, tmp_path: Path) -> None:
    library, rng = build(isa, tmp_path), np.random.default_rng()
    for u4, zeros, (low, high) in ((True, (0, 8, 15), (0, 15)), (False, (0, 3, -128, 127), (-128, 127))):
        for zero in zeros:
            codes = rng.choice([low, high, rng.integers(low, high + 1)], (16, BLOCK))
            codes[0], codes[1] = low, high
            x = rng.choice([-127, 127, rng.integers(-127, 128)], (ROWS, BLOCK))
            x[0], x[1] = 127, -127
            want = x @ (codes - zero).T
            quads = np.ascontiguousarray(codes.reshape(16, 8, 4).swapaxes(0, 1), np.int8)
            rows = np.ascontiguousarray(x.reshape(ROWS, 8, 4).swapaxes(0, 1), np.int8)
            pairs = x.reshape(ROWS, -1, 2, 2).sum((1, 3)).T.astype(np.int32, order="C")
            found = np.full((ROWS, 16), -1, np.int32)
            library.run(u4, *(ctypes.c_void_p(pointer(a)) for a in (quads, rows, pairs)), zero,
                        ctypes.c_void_p(pointer(found)))  # fmt: skip
            assert np.array_equal(found, want), (u4, zero)
