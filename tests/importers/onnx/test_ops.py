"""Each converter against onnx's own reference evaluator, on embeddings, positions and constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.importers.onnx.graphs import WIDTH, Make, Sketch, both

RNG = np.random.default_rng(4)


def _f(*shape: int) -> np.ndarray:
    return RNG.normal(0, 1, shape).astype(np.float32)


def _positions(s: Sketch) -> str:
    """[1, S]: 0, 1, ..."""
    size = s.add("Squeeze", s.add("Shape", "ids", start=1, end=2))
    return s.add("Unsqueeze", s.add("Range", s.array(0), size, s.array(1)), s.ints(0))


def _added(s: Sketch, integers: str) -> str:
    """x plus an integer tensor [1, S] or what broadcasts to [1, S, WIDTH] with an axis behind it."""
    wide = s.add("Unsqueeze", s.add("Cast", integers, to=1), s.ints(-1))
    return s.add("Add", "x", wide)


def _mask(s: Sketch, window: int = 0) -> str:
    """[S, S] boolean: causal, of a window."""
    row, column = _positions(s), _positions(s)
    q, k = s.add("Transpose", row, perm=[1, 0]), column
    keep = s.add("LessOrEqual", k, q)
    if window:
        keep = s.add("And", keep, s.add("Less", s.add("Sub", q, k), s.array(window)))
    return keep


def _heads(s: Sketch, name: str, count: int, size: int = 4) -> str:
    """[1, count, S, size] of x."""
    made = s.add("MatMul", "x", s.array(_f(WIDTH, count * size)))
    return s.add("Transpose", s.add("Reshape", made, s.ints(0, 0, count, size)), perm=[0, 2, 1, 3], out=name)


def _flat(s: Sketch, heads: str) -> str:
    return s.add("Reshape", s.add("Transpose", heads, perm=[0, 2, 1, 3]), s.ints(0, 0, -1))


def _attention(s: Sketch) -> str:
    q, k, v = _heads(s, "q", 4), _heads(s, "k", 2), _heads(s, "v", 2)
    made = s.add("Attention", q, k, v, _mask(s, 3), scale=0.3, softcap=2.0)
    return _flat(s, made)


def _attention_3d(s: Sketch) -> str:
    q, k, v = (s.add("MatMul", "x", s.array(_f(WIDTH, n))) for n in (16, 8, 8))
    return s.add("Attention", q, k, v, q_num_heads=4, kv_num_heads=2, is_causal=1)


def _attention_bias(s: Sketch) -> str:
    q, k, v = _heads(s, "q", 2), _heads(s, "k", 2), _heads(s, "v", 2)
    low = s.add("Where", _mask(s), s.array(np.float32(0)), s.array(np.float32(-1e30)))
    return _flat(s, s.add("Attention", q, k, v, low))


def _rotary(s: Sketch, **attrs: int) -> str:
    x = _heads(s, "q", 2, 8)
    half = attrs.get("rotary_embedding_dim", 8) // 2
    cos, sin = (s.array(_f(32, half)) for _ in range(2))
    return _flat(s, s.add("RotaryEmbedding", x, cos, sin, _positions(s), **attrs))


def _rotary_3d(s: Sketch) -> str:
    cos, sin = (s.array(_f(32, 2)) for _ in range(2))
    return s.add("RotaryEmbedding", "x", cos, sin, _positions(s), num_heads=2)


def _counted(s: Sketch) -> str:
    """Positions as a running sum of a mask of ones, less one."""
    ones = s.add("ConstantOfShape", s.add("Shape", "ids"), value=_one())
    count = s.add("CumSum", ones, s.array(1))
    return _added(s, s.add("Sub", count, s.array(1)))


def _one():  # noqa: ANN202
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array([1], np.int64))


def _steps(s: Sketch) -> str:
    """What exporters write to find packed sequences: how often positions do not go on by one."""
    positions = _positions(s)
    first = s.add("Slice", positions, s.ints(0), s.ints(1), s.ints(1))
    before = s.add("Concat", s.add("Sub", first, s.array(1)), positions, axis=1)
    now = s.add("Slice", before, s.ints(1), s.ints(2**40), s.ints(1))
    then = s.add("Slice", before, s.ints(0), s.ints(-1), s.ints(1))
    jumps = s.add("Not", s.add("Equal", s.add("Sub", now, then), s.array(1)))
    return _added(s, s.add("CumSum", s.add("Cast", jumps, to=7), s.array(1)))


def _concatenated(s: Sketch) -> str:
    """A piece that does not go on where the other ends."""
    positions = _positions(s)
    first = s.add("Slice", positions, s.ints(0), s.ints(1), s.ints(1))
    rest = s.add("Slice", positions, s.ints(0), s.ints(-1), s.ints(1))
    return _added(s, s.add("Concat", s.add("Add", first, s.array(7)), rest, axis=1))


def _gathered_nd(s: Sketch) -> str:
    positions = _positions(s)
    doubled = s.add("Mul", positions, s.array(3))
    places = s.add("Unsqueeze", positions, s.ints(-1))
    zeros = s.add("Mul", places, s.array(0))
    return _added(s, s.add("GatherND", doubled, s.add("Concat", zeros, places, axis=-1)))


def _divided(s: Sketch) -> str:
    positions = _positions(s)
    parts = [s.add("Div", positions, s.array(3)), s.add("Mod", positions, s.array(4))]
    return _added(s, s.add("Max", s.add("Add", *parts), s.array(2)))


def _trilu(s: Sketch) -> str:
    ones = s.add("ConstantOfShape", s.ints(WIDTH, WIDTH))
    filled = s.add("Trilu", s.add("Add", ones, s.array(np.float32(2))), s.array(1), upper=1)
    return s.add("MatMul", "x", filled)


def _lookup(s: Sketch) -> str:
    return s.add("Add", "x", s.add("Gather", s.array(_f(32, WIDTH)), _positions(s)))


def _split(s: Sketch) -> str:
    s.add("Split", "x", s.ints(3, 5), several=2, axis=-1, out="part")
    return s.add("Concat", s.nodes[-1].output[1], "part", axis=2)


def _sliced(s: Sketch) -> str:
    return s.add("Slice", "x", s.ints(-6), s.ints(2**60), s.ints(-1), s.ints(2))


def _one_column(s: Sketch) -> str:
    return s.add("Unsqueeze", s.add("Gather", "x", s.array(-2), axis=2), s.ints(2))


def _frequencies(s: Sketch) -> str:
    """Rotary angles as a product with an inner axis of one element."""
    positions = s.add("Cast", s.add("Unsqueeze", _positions(s), s.ints(1)), to=1)
    table = s.array(_f(1, WIDTH, 1))
    return s.add("Add", "x", s.add("Transpose", s.add("MatMul", table, positions), perm=[0, 2, 1]))


def _tiled(s: Sketch) -> str:
    return s.add("Tile", "x", s.ints(1, 1, 2))


def _norm(s: Sketch) -> str:
    return s.add("LayerNormalization", "x", s.array(_f(WIDTH)), s.array(_f(WIDTH)), epsilon=1e-3)


def _gemm(s: Sketch) -> str:
    flat = s.add("Reshape", "x", s.ints(-1, WIDTH))
    made = s.add("Gemm", flat, s.array(_f(5, WIDTH)), s.array(_f(5)), transB=1)
    again = s.add("Gemm", made, s.array(_f(5, 6)), s.array(_f(1, 6)), alpha=0.5, beta=2.0)
    return s.add("Unsqueeze", again, s.ints(0))


def _reduced(kind: str) -> Make:
    return lambda s: s.add("Mul", "x", s.add(kind, "x", s.ints(-1), keepdims=1))


def _unary(kind: str, **attrs: object) -> Make:
    return lambda s: s.add(kind, "x", **attrs)


def _positive(kind: str) -> Make:
    return lambda s: s.add(kind, s.add("Abs", "x"))


CASES: dict[str, Make] = {
    **{
        kind: _unary(kind) for kind in ("Exp", "Tanh", "Sin", "Cos", "Floor", "Sigmoid", "Erf", "Relu", "Neg")
    },
    **{kind: _unary(kind) for kind in ("Neg", "Softplus", "Gelu", "LeakyRelu", "Identity", "Softmax")},
    **{kind: _positive(kind) for kind in ("Log", "Sqrt", "Reciprocal")},
    **{kind: _reduced(kind) for kind in ("ReduceSum", "ReduceMean", "ReduceMax")},
    "Gelu of tanh": _unary("Gelu", approximate="tanh"),
    "RMSNormalization": lambda s: s.add("RMSNormalization", "x", s.array(_f(WIDTH)), epsilon=1e-4),
    "LayerNormalization": _norm,
    "Pow": lambda s: s.add("Pow", "x", s.ints(3)),
    "Clip": lambda s: s.add("Clip", "x", s.array(np.float32(-0.5)), s.array(np.float32(0.25))),
    "Min of three": lambda s: s.add("Min", "x", s.array(_f(WIDTH)), s.array(np.float32(0.4))),
    "Where": lambda s: s.add("Where", s.add("Less", "x", s.array(_f(WIDTH))), "x", s.array(_f(WIDTH))),
    "Where of constants": lambda s: s.add("Where", s.array(np.array([True])), "x", s.array(_f(1, 1, WIDTH))),
    "Gemm": _gemm,
    "MatMul with an inner axis of one": _frequencies,
    "Split": _split,
    "Slice": _sliced,
    "Gather of a column": _one_column,
    "Gather at positions": _lookup,
    "Tile": _tiled,
    "Trilu": _trilu,
    "CumSum of ones": _counted,
    "CumSum of what never holds": _steps,
    "Concat that does not go on": _concatenated,
    "GatherND": _gathered_nd,
    "Div and Mod of positions": _divided,
    "Attention": _attention,
    "Attention of three axes": _attention_3d,
    "Attention with numbers as a mask": _attention_bias,
    "RotaryEmbedding": _rotary,
    "RotaryEmbedding, interleaved": lambda s: _rotary(s, interleaved=1),
    "RotaryEmbedding, of a part": lambda s: _rotary(s, rotary_embedding_dim=4),
    "RotaryEmbedding of three axes": _rotary_3d,
}


@pytest.mark.parametrize("name", CASES)
def test_as_the_reference_evaluator(name: str, tmp_path: Path) -> None:
    sketch = Sketch()
    model = sketch.model(CASES[name](sketch))
    for length in (1, 7):
        found, expected = both(model, tmp_path, length)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def test_positions_need_no_ops(tmp_path: Path) -> None:
    """What finds packed sequences is nothing where positions go on by one."""
    from compiler.importers.onnx.load import load_onnx
    from tests.importers.onnx.graphs import saved

    sketch = Sketch()
    imported = load_onnx(saved(sketch.model(_steps(sketch)), tmp_path), 32)
    assert {op.kind for op in imported.graph.ops} <= {"embed", "full", "cast", "add", "reshape"}
