"""What a profiled step records, and the loops that measure the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from codegen.cpp.context import Context
from tests.codegen.harness import Array, Chunk, Model, build_cpp, level, levels, pointer
from tests.codegen.test_forward import BLOCKS, TABLE_A, A, graph

WAIT, RESUME, END = -1, -2, -3
READ = """
#include "limits.h"
extern "C" OCTAVO_EXPORT int64_t read_all(const char* data, int64_t bytes) {
  return octavo::sum_words(data, bytes);
}
extern "C" OCTAVO_EXPORT void measure(int32_t threads, const char* data, int64_t bytes, octavo_limits* out) {
  octavo::Pool pool(threads);
  *out = octavo::measure(pool, data, bytes);
}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(graph(), None, tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Model) -> Iterator[int]:
    engine = model.open(2)
    yield engine
    model.library.octavo_close(engine)


def record(model: Model, engine: int, marks: Array | None) -> None:
    address, width = (None, 0) if marks is None else (pointer(marks), marks.shape[1])
    model.library.octavo_record(ctypes.c_void_p(engine), ctypes.c_void_p(address), ctypes.c_int64(width))


def step(model: Model, engine: int) -> Array:
    return model.step(engine, model.cache(BLOCKS), [Chunk(TABLE_A, 0, A)])


def test_every_thread_marks_every_kernel_and_every_wait(model: Model, engine: int) -> None:
    plain, marks = step(model, engine), np.zeros((2, 400, 2), np.int64)
    record(model, engine, marks)
    assert np.array_equal(step(model, engine), plain)
    num_kernels = len(Context.of(model.graph).schedule.kernels)
    for thread in marks:
        used = thread[thread[:, 0] != 0]
        what = used[:, 1].tolist()
        assert [w for w in what if w >= 0] == list(range(num_kernels))
        assert what[-1] == END and what.count(END) == 1
        assert all(a == WAIT for a, b in zip(what, what[1:], strict=False) if b == RESUME)
        assert what.count(WAIT) == what.count(RESUME) > 0
        assert (np.diff(used[:, 0]) >= 0).all()


def test_marks_stay_in_their_room_and_stop(model: Model, engine: int) -> None:
    marks = np.zeros((4, 3, 2), np.int64)
    record(model, engine, marks[1:3])  # two threads' room
    step(model, engine)
    assert (marks[1:3, :, 0] > 0).all() and not marks[0].any() and not marks[3].any()
    record(model, engine, None)
    before = marks.copy()
    step(model, engine)
    assert np.array_equal(marks, before)


@pytest.mark.parametrize("isa", levels())
def test_the_plain_read_reads_every_word(isa: str, tmp_path: Path) -> None:
    library = build_cpp(READ, tmp_path, isa)
    library.read_all.restype = ctypes.c_int64
    words = np.random.default_rng(0).integers(-(2**60), 2**60, 1003)
    for count in (0, 1, 15, 16, 17, 1003):
        with np.errstate(over="ignore"):
            expected = words[:count].sum()
        assert library.read_all(ctypes.c_void_p(pointer(words)), ctypes.c_int64(count * 8)) == expected


@pytest.mark.parametrize("isa", levels())
def test_limits_name_what_the_level_has(isa: str, tmp_path: Path) -> None:
    library, limits = build_cpp(READ, tmp_path, isa), np.zeros(5)
    data = np.ones(1 << 20, np.uint8)
    library.measure(
        2, ctypes.c_void_p(pointer(data)), ctypes.c_int64(data.nbytes), ctypes.c_void_p(pointer(limits))
    )
    assert (limits[[0, 1, 3, 4]] > 0).all() and np.isfinite(limits).all()
    assert (limits[2] > 0) == ("avx512_bf16" in level(isa).features)
