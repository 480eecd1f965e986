"""Reused results are the ones that a run of its own gives, bit for bit, and spare what did not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ir.graph import Arg, Graph, Scalar, Value
from ir.interpret import empty_kv, interpret
from ir.reuse import Reuse
from ir.text import parse
from ir.types import KV
from passes.page_kv import PageKv
from tests.passes.test_page_kv import VOCAB, two_layers, weights

FORMS = [
    "full {shape=[2], value=0.0} : f32[2]",
    "full {shape=[2], value=-0.0} : f32[2]",
    "full {shape=[2], value=1} : f32[2]",
    "full {shape=[3], value=1} : f32[3]",
    'full {shape=[2], value=1, dtype="i32"} : i32[2]',
    'full {shape=[2], value=true, dtype="bool"} : bool[2]',
    "clamp %x {low=0.0} : f32[N,4]",
    "clamp %x {low=-0.0} : f32[N,4]",
    "clamp %x {high=0.0} : f32[N,4]",
    "add %x, 1 : f32[N,4]",
    "sub %x, 1 : f32[N,4]",
    "sub 1, %x : f32[N,4]",
    "div %x, 0.0 : f32[N,4]",
    "div %x, -0.0 : f32[N,4]",
    "sub %x, %z : f32[N,4]",
    "sub %z, %x : f32[N,4]",
    'cast %x {dtype="bf16"} : bf16[N,4]',
    'cast %x {dtype="f16"} : f16[N,4]',
    "linear %x, @a: f32[3,4] : f32[N,3]",
    "linear %x, @b: f32[3,4] : f32[N,3]",
    "linear %x, @a: f32[3,4], @c: f32[3] : f32[N,3]",
    "linear %z, @a: f32[3,4] : f32[N,3]",
    'linear %x, @a: f32[3,4] {dtype="bf16"} : bf16[N,3]',
    'linear %x, @a: f32[3,4] {activation="silu"} : f32[N,3]',
    "reshape %x {shape=[2*N,2]} : f32[2*N,2]",
    "reshape %x {shape=[2,2*N]} : f32[2,2*N]",
    "iota {size=N} : i32[N]",
    'iota {size=N, dtype="i64"} : i64[N]',
]


def form(*ops: str) -> Graph:
    """A graph of two inputs and the ops, whose results are called %0, %1 and so on."""
    lines = "".join(f"  %{i} = {op}\n" for i, op in enumerate(ops))
    inputs = "%x: f32[N,4], %z: f32[N,4]"
    return parse(f"graph @g({inputs}) dims {{N: 1..9}} {{\n{lines}  return %{len(ops) - 1}\n}}\n")


def same(found: Any, expected: Any) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


def test_computations_that_differ_in_one_thing_are_not_taken_for_each_other() -> None:
    rng = np.random.default_rng()
    read = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=(3, 4)), "c": rng.normal(size=3)}
    arrays = [rng.normal(size=(n, 4)).astype(np.float32) for n in (2, 2, 3, 3)]
    arrays[0][0] = 0.0, -0.0, np.nan, np.inf
    inputs = [dict(zip("xz", pair, strict=True)) for pair in (arrays[:2], arrays[1::-1], arrays[2:])]
    reuse = Reuse()
    for _ in range(2):
        for line in FORMS:
            for given in inputs:
                for kind in (np.float32, np.float64):
                    run = interpret(form(line), given, read, kind, reuse)
                    assert same(run.outputs[0], interpret(form(line), given, read, kind).outputs[0]), line


def changed(graph: Graph, index: int, rng: np.random.Generator) -> Graph:
    """The graph with a number that stands in an op replaced by another, or a weight by its like."""
    op, like = graph.ops[index], [w for w in graph.weights]
    numbers = [name for name, a in op.attrs.items() if isinstance(a, float)]
    if numbers:
        new = op.with_attrs(**{numbers[0]: float(rng.normal())})
    else:
        args: list[Arg] = []
        for a in op.args:
            alike = [w for w in like if not isinstance(a, Value | Scalar | None) and w.type == a.type]
            args.append(alike[rng.integers(len(alike))] if alike else a)
        new = replace(op, args=tuple(args))
    return replace(graph, ops=(*graph.ops[:index], new, *graph.ops[index + 1 :]))


def steps(graph: Graph, read: Any, tokens: Any, reuse: Reuse | None) -> list[dict[str, Any]]:
    """Every value of two steps of one request, the second on the KV state that the first left."""
    states = {v.name: v.type for v in graph.inputs if isinstance(v.type, KV)}
    kv = {name: empty_kv(type, 3) for name, type in states.items()}
    found: list[dict[str, Any]] = []
    for first, end in ((0, 7), (7, len(tokens))):
        pos = np.arange(first, end)
        inputs: dict[str, Any] = {"ids": tokens[first:end], "pos": pos, "rows": pos - first, **kv}
        inputs |= {"lens": np.array([end]), "starts": np.array([0, end - first])}
        for name in states:
            inputs |= {f"slots{name[2:]}": pos + 16, f"table{name[2:]}": np.array([[1, 2]])}
        run = interpret(graph, inputs, read, reuse=reuse)
        kv = dict(zip(states, run.outputs[1:], strict=True))
        found.append(dict(run.values))
    return found


@pytest.mark.parametrize("limit", [0, 4000, 1 << 30])
def test_changed_graphs_over_a_cache_give_their_own_values(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where little or nothing may be kept, and where most is too large to be read for a digest."""
    monkeypatch.setattr(Reuse, "LIMIT_BYTES", limit)
    monkeypatch.setattr(Reuse, "LARGE_BYTES", limit // 4)
    monkeypatch.setattr(Reuse, "READ_BYTES", limit // 16)
    rng = np.random.default_rng()
    graph = PageKv().run(two_layers()).graph
    read, tokens, reuse = weights(graph), rng.integers(0, VOCAB, 12), Reuse()
    for index in range(len(graph.ops)):
        reuse.next_round()
        now = changed(graph, index, rng)
        for found, expected in zip(
            steps(now, read, tokens, reuse), steps(now, read, tokens, None), strict=True
        ):
            for name, value in expected.items():
                for array, wanted in zip(parts(found[name]), parts(value), strict=True):
                    assert same(array, wanted), f"%{name} after {graph.ops[index].kind}"


def parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else [value]


def seen(graph: Graph, ids: Any, reuse: Reuse) -> set[str]:
    """The weights that a run over the cache reads."""
    names: set[str] = set()
    read = weights(graph)

    def reader(name: str) -> Any:
        names.add(name)
        return read[name]

    interpret(graph, {"ids": ids, "pos": np.arange(ids.shape[1])[None]}, reader, reuse=reuse)
    return names


def test_only_what_depends_on_a_change_is_computed_again() -> None:
    graph, reuse = two_layers(), Reuse()
    ids = np.random.default_rng().integers(0, VOCAB, (1, 9))
    assert seen(graph, ids, reuse) == {w.name for w in graph.weights}
    reuse.next_round()
    assert seen(graph, ids, reuse) == set()
    index = next(i for i, op in enumerate(graph.ops) if op.outs[0].name == "o1")
    broken = replace(
        graph, ops=(*graph.ops[:index], graph.ops[index].with_attrs(scale=0.9), *graph.ops[index + 1 :])
    )
    assert seen(broken, ids, reuse) == {"head"}
    assert seen(graph, 1 - np.minimum(ids, 1), reuse) == {w.name for w in graph.weights}


def test_what_depends_on_an_equal_result_is_not_computed_again() -> None:
    """Doubling twice and once by four are other ops with the same bits."""
    linear = "linear %{}, @a: f32[3,4] : f32[N,3]"
    twice = ("mul %x, 2.0 : f32[N,4]", "mul %0, 2.0 : f32[N,4]", linear.format(1))
    once = ("mul %x, 4.0 : f32[N,4]", linear.format(0))
    reuse, x = Reuse(), np.ones((2, 4), np.float32)
    interpret(form(*twice), {"x": x, "z": x}, {"a": np.ones((3, 4))}, reuse=reuse)
    run = interpret(form(*once), {"x": x, "z": x}, {}, reuse=reuse)
    np.testing.assert_array_equal(run.outputs[0], np.full((2, 3), 16.0))


def test_what_two_rounds_did_not_use_is_forgotten() -> None:
    graph, reuse = two_layers(), Reuse()
    ids = np.random.default_rng().integers(0, VOCAB, (1, 9))
    seen(graph, ids, reuse)
    reuse.next_round()
    reuse.next_round()
    assert seen(graph, ids, reuse) == {w.name for w in graph.weights}
