"""Every argument of the Python interface, given what it cannot be: refused, with where and what to do."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime import OctavoError, ResourceError, Sampling
from runtime.service import Service
from tests.runtime import made
from tests.runtime.fake import fake_engine

NAN, HUGE = float("nan"), 10**5000  # of more digits than Python writes
NO_NUMBER: list[Any] = [NAN, "x", "", b"x", [1], {}, object(), np.array([1, 2]), lambda: 1]
NO_COUNT = [-1, 2**70, HUGE, 1.5, True, *NO_NUMBER]
NO_TEXT: list[Any] = [5, HUGE, True, b"x", [1], {}, object(), np.array([1, 2])]
NO_IDS: list[Any] = [5, HUGE, "x", b"x", {}, object(), [1.5], [True], [-1], [2**40], [None], ["a"], NAN]
NO_PATH: list[Any] = [None, 5, NAN, b"x", [], {}, object(), "nowhere", "a\nb\0c", "\ud800", "x" * 300]

FIELDS = {
    "max_new_tokens": NO_COUNT,
    "temperature": [-1, 2**70, True, float("inf"), -float("inf"), 1e-30, *NO_NUMBER],
    "top_k": NO_COUNT,
    "top_p": [0, -1, 1.01, float("inf"), True, *NO_NUMBER],
    "min_p": [-0.1, 1.01, float("inf"), True, *NO_NUMBER],
    "seed": NO_COUNT,
    "stop": [5, HUGE, "", ["a", ""], ["a", "b", "a"], [1], [None], b"x", {"a"}, object()],
    "stop_token_ids": [i for i in NO_IDS if i != "x"] + ["", "x", [2**31]],
    "ignore_eos": [None, 0, "yes", np.array([1, 2])],
    "logprobs": NO_COUNT,
    "prompt_logprobs": NO_COUNT,
    "n": [0, *NO_COUNT],
    "beams": [0, *NO_COUNT],
    "length_penalty": [11, -11, True, float("inf"), *NO_NUMBER],
    "early_stopping": [None, 0, "always", np.array([1, 2])],
    "repetition_penalty": [0, -1, 101, True, float("inf"), *NO_NUMBER],
    "presence_penalty": [2.1, -2.1, True, float("inf"), *NO_NUMBER],
    "frequency_penalty": [2.1, -2.1, True, float("inf"), *NO_NUMBER],
    "logit_bias": [
        *(5, HUGE, True, None, "", "x", "ab", b"x", [1], [None], {1}, object(), np.array([1, 2]), lambda: 1),
        *({i: 1.0} for i in (-1, 2**31, 1.5, True, None, "1", HUGE)),
        *({1: bias} for bias in (100.5, -101, float("inf"), NAN, True, None, "1", HUGE)),
        *([(1, 2.0), (1, 3.0)], [(1, 2.0, 3.0)]),
    ],
    "draft_tokens": [65, *NO_COUNT],
}
SERVICE = {
    "priority": [1001, -1001, *NO_COUNT[1:]],
    "timeout_s": [0, -1, float("inf"), True, *NO_NUMBER],
    "cache_salt": [None, *NO_TEXT],
}
LOAD = {
    "path": NO_PATH,
    "target": ["abacus", "", *NO_TEXT],
    "threads": [0, *NO_COUNT],
    "kv_blocks": [0, *NO_COUNT],
    "kv_memory": [-1, HUGE, NAN, True, "x", "", "0%", "101%", "nan%", "3 zb", "9" * 40, b"x", [1], object()],
    "max_step_tokens": [0, *NO_COUNT],
    "max_requests": [0, *NO_COUNT],
    "prefix_cache": [None, 0, "x", HUGE, np.array([1, 2])],
    "swap_memory": [-1, HUGE, NAN, None, "x", "40%", b"x", [1]],
    "verify": ["slow", "", *NO_TEXT],
    "digest": ["", "sha256:0", *NO_TEXT],
    "isa": ["v9", "", *NO_TEXT],
    "draft": ["abacus", "", "a\0b", "/nowhere", *NO_TEXT],
    "acceptance": ["always", "", *NO_TEXT],
    "max_draft_tokens": [0, 65, *NO_COUNT],
}


def refused(call: Callable[[], Any], shown: str) -> None:
    with pytest.raises(OctavoError) as error:
        call()
    assert error.value.where and error.value.todo and error.value.what, shown
    assert len(str(error.value)) < 700, shown


@pytest.mark.parametrize(
    ("kind", "table"), [(Sampling, FIELDS), (Service, SERVICE)], ids=["sampling", "service"]
)
def test_fields_are_refused(kind: Any, table: dict[str, list[Any]]) -> None:
    assert set(table) == {field.name for field in dataclasses.fields(kind)}
    for name, values in table.items():
        for index, value in enumerate(values):
            refused(lambda name=name, value=value: kind(**{name: value}), f"{name}, {index}")


def test_what_is_loaded_is_refused(tmp_path: Path) -> None:
    engine = made.write(tmp_path / "tiny.octavo")
    assert set(LOAD) == set(inspect.signature(runtime.load).parameters) - {"report"}  # a function to call
    planned = set(inspect.signature(runtime.plan).parameters)
    assert planned <= set(LOAD)
    for name, values in LOAD.items():
        for index, value in enumerate(values):
            given = {"path": engine, name: value}
            refused(lambda given=given: runtime.load(**given), f"{name}, {index}")
            if name in planned:
                refused(lambda given=given: runtime.plan(**given), f"plan: {name}, {index}")


@pytest.mark.parametrize("option", [{"acceptance": "exact"}, {"max_draft_tokens": 8}], ids=str)
def test_how_to_draft_is_refused_where_nothing_drafts(option: dict[str, Any], tmp_path: Path) -> None:
    path, (name,) = made.write(tmp_path / "tiny.octavo"), option
    calls: list[Callable[..., Any]] = [
        runtime.load,
        lambda path, **given: runtime.generate(path, IDS, **given),
    ]
    if name in inspect.signature(runtime.plan).parameters:
        calls.append(runtime.plan)
    for call in calls:
        with pytest.raises(ResourceError, match=f"^{name}: nothing drafts here. Choose draft = 'lookup'"):
            call(path, **option)


@pytest.fixture(scope="module")
def engine() -> Iterator[runtime.Engine]:
    with fake_engine() as engine:
        yield engine


IDS = [3, 1, 4]
NO_PROMPT: list[Any] = [[], "a text", [{"role": "user", "content": "x"}], np.zeros((2, 2)), [10**6], *NO_IDS]
NO_REQUEST: list[Any] = [None, 5, "x", [], {}, object(), IDS]
REQUEST = {
    "prompt": NO_PROMPT,
    "sampling": [5, "x", {}, [], Sampling],
    "prompt_index": NO_COUNT,
    **SERVICE,
}


def test_requests_are_refused(engine: runtime.Engine) -> None:
    assert set(REQUEST) == set(inspect.signature(engine.submit).parameters)
    for name, values in REQUEST.items():
        for index, value in enumerate(values):
            given = {"prompt": IDS, name: value}
            refused(lambda given=given: engine.submit(**given), f"submit: {name}, {index}")
            if name in ("prompt", *SERVICE) and name != "timeout_s":
                given = {"prompt": IDS * 20, name: value}
                refused(lambda given=given: engine.pin(**given), f"pin: {name}, {index}")


def test_what_is_asked_of_requests_is_refused(engine: runtime.Engine) -> None:
    parent = engine.submit(IDS, Sampling(3))
    parent.result()
    table: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "sampling": (lambda v: parent.fork(v), [5, "x", {}, Sampling]),
        "append": (lambda v: parent.fork(append=v), [v for v in NO_PROMPT if not isinstance(v, list) or v]),
        "sample": (lambda v: parent.fork(sample=v), [1, *NO_COUNT]),
        "keep": (lambda v: parent.fork(keep=v), [4, *NO_COUNT]),
        "timeout_s": (lambda v: parent.fork(timeout_s=v), SERVICE["timeout_s"]),
        "parent": (lambda v: engine.fork(v), NO_REQUEST),
        "cancel": (lambda v: engine.cancel(v), NO_REQUEST),
        "log": (lambda v: engine.log(v), [None, *NO_COUNT]),
        "tokens": (lambda v: parent.tokens(v), [1, *NO_COUNT]),
        "result": (lambda v: parent.result(v), [-1, True, *NO_NUMBER]),
        "results": (lambda v: parent.results(v), [-1, True, *NO_NUMBER]),
    }
    for name, (call, values) in table.items():
        for index, value in enumerate(values):
            refused(lambda call=call, value=value: call(value), f"{name}, {index}")


def test_what_is_generated_from_is_refused(engine: runtime.Engine) -> None:
    table: dict[str, list[Any]] = {
        **FIELDS,
        **SERVICE,
        "stop": [v for v in FIELDS["stop"] if v != ""],
        "logit_bias": [v for v in FIELDS["logit_bias"] if v is not None],
        "seed": [*FIELDS["seed"][:4], [1, 2], ["x"]],
        "stream": [None, 1, "x", np.array([1, 2])],
        **{name: LOAD[name] for name in ("draft", "acceptance", "max_draft_tokens")},
    }
    rest = set(inspect.signature(runtime.generate).parameters) - {"engine", "prompts", "sampling"}
    assert set(table) == rest
    for name, values in table.items():
        for index, value in enumerate(values):
            refused(
                lambda name=name, value=value: runtime.generate(engine, [IDS], **{name: value}),
                f"{name}, {index}",
            )
    for index, value in enumerate([None, 5, "", [], [None], [[]], {}, object(), np.zeros((2, 2))]):
        refused(lambda value=value: runtime.generate(engine, value), f"prompts, {index}")
    for index, value in enumerate([5, "x", [], [Sampling(), Sampling()], [None], object()]):
        refused(lambda value=value: runtime.generate(engine, [IDS], value), f"sampling, {index}")
    for index, value in enumerate(NO_PATH):
        refused(lambda value=value: runtime.generate(value, [IDS]), f"engine, {index}")
