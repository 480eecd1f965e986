"""Where chat templates run: jinja2's immutable sandbox, with a budget of steps, sizes and time.

A template comes with a checkpoint and is untrusted. The sandbox keeps it from Python's attributes and from
modules; what it does not bound is bounded here: loops and calls are counted, and each value is measured
before it is put into a text, a list or a call, so that none doubles itself until memory is full.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 20
MAX_STEPS = 1_000_000  # iterations and calls
MAX_SIZE = 1 << 26  # characters, over all values that are built
MAX_ELEMENTS = 1 << 19  # that are measured, over all of them
MAX_NUMBER = 1 << 20  # of an argument: a width, a count
MAX_DEPTH = 200  # of values, and of a template's own nesting
TIMEOUT_S = 5.0
_WIDE = re.compile(r"\d{6,}")


class Budget:
    """What is left of it in one rendering."""

    def __init__(self) -> None:
        self._steps = self._size = self._elements = 0
        self._end = time.monotonic() + TIMEOUT_S

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS:,} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._end:
            raise SecurityError(f"more than {TIMEOUT_S:.0f} s")

    def take(self, size: int) -> None:
        self.step()
        self._size += size
        if self._size > MAX_SIZE:
            raise SecurityError(f"more than {MAX_SIZE:,} characters are built")

    def measure(self, *values: Any) -> None:
        """Count all that the values hold, as often as they hold it."""
        found, waiting = 0, [(value, 0) for value in values]
        while waiting:
            value, depth = waiting.pop()
            found += len(value) if isinstance(value, str | bytes) else 1
            self._elements += 1
            if depth > MAX_DEPTH or self._elements > MAX_ELEMENTS or len(waiting) > MAX_ELEMENTS:
                raise SecurityError("a value is too large or nested too deep")
            if isinstance(value, Mapping):
                waiting += [(item, depth + 1) for pair in value.items() for item in pair]
            elif isinstance(value, list | tuple | set | frozenset):
                waiting += [(item, depth + 1) for item in value]
        self.take(found)


class Environment(ImmutableSandboxedEnvironment):
    """budget: of the rendering that goes on; one at a time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    budget: Budget

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._written, **options)
        self.globals.pop("lipsum")
        self.filters = {name: self._bounded(function) for name, function in self.filters.items()}
        self.filters |= {_COUNTED: self._counted, _MEASURED: self._measured, _JOINED: self._joined}
        self.budget = Budget()

    def add_filter(self, name: str, function: Any) -> None:
        self.filters[name] = self._bounded(function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"a template of {len(source):,} characters; at most {MAX_SOURCE:,} are read")
        return _Bounds(self).visit(super()._parse(source, name, filename))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        __self._check_call(getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None), args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.measure(left, right)
        if operator == "**" and not _is_small_power(left, right):
            raise SecurityError("a power is too large")
        if operator == "*":
            self._check_repeat(left, right)
        if operator == "%" and isinstance(left, str):
            self._check_format(left)
        return super().call_binop(context, operator, left, right)

    def _check_repeat(self, left: Any, right: Any) -> None:
        for thing, count in ((left, right), (right, left)):
            if isinstance(thing, str | list | tuple) and isinstance(count, int):
                self.budget.take(len(thing) * max(0, count))
            elif isinstance(thing, int) and thing.bit_length() > 4096:
                raise SecurityError("a number is too large")

    def _check_call(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        values = (*args, *kwargs.values())
        self.budget.measure(owner, *values)
        if any(isinstance(v, int) and abs(v) > MAX_NUMBER for v in values):
            raise SecurityError("a number is too large")
        if name == "replace" and isinstance(owner, str) and len(values) > 1 and isinstance(values[1], str):
            self.budget.take((len(owner) + 1) * len(values[1]))
        if name == "join" and isinstance(owner, str) and values and isinstance(values[0], list | tuple):
            self.budget.take(len(owner) * len(values[0]))
        if name == "format" and isinstance(owner, str):  # the filter
            self._check_format(owner)

    def wrap_str_format(self, value: Any) -> Any:
        """Of a text's methods format and format_map, where it is looked up."""
        found = super().wrap_str_format(value)
        if found is not None:
            self._check_format(str(value.__self__))
        return found

    def _check_format(self, text: str) -> None:
        if _WIDE.search(text) or "*" in text:
            raise SecurityError("a format is too wide")

    def _bounded(self, function: Any) -> Any:
        """A filter whose arguments are checked as a method's are."""
        name = getattr(function, "__name__", "").removeprefix("do_").removeprefix("sync_do_")

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            given = [a for a in args if not hasattr(a, "environment") and a is not self]
            owner, rest = (given[0], tuple(given[1:])) if given else (None, ())
            if name == "join" and rest and isinstance(rest[0], str) and isinstance(owner, list | tuple):
                self.budget.take(len(rest[0]) * len(owner))
            self._check_call(name, owner, rest, kwargs)
            return function(*args, **kwargs)

        return bounded

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.budget.step()
            yield value

    def _measured(self, value: Any) -> Any:
        self.budget.measure(value)
        return value

    def _written(self, value: Any) -> Any:
        return self._measured(value)

    def _joined(self, values: Any) -> str:
        self.budget.measure(values)
        return "".join(map(str, values))


_COUNTED, _MEASURED, _JOINED = "counted by the sandbox", "measured by the sandbox", "joined by the sandbox"


class _Bounds(NodeTransformer):
    """Puts the counting filters into a template's tree."""

    def __init__(self, environment: Environment) -> None:
        self._environment, self._depth = environment, 0

    def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TemplateError(f"nested deeper than {MAX_DEPTH}")
        found = super().generic_visit(node, *args, **kwargs)
        self._depth -= 1
        return found

    def _through(self, node: Any, name: str) -> Any:
        found = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return found.set_environment(self._environment)

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.recursive:
            raise TemplateError("recursive loops are not run")
        self.generic_visit(node)
        node.iter = self._through(node.iter, _COUNTED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno).set_environment(self._environment)
        return self._through(parts, _JOINED)

    def _collection(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        held = node.iter_child_nodes()
        is_constant = all(isinstance(n, nodes.Const) for n in held)
        return (
            node if is_constant or getattr(node, "ctx", "load") != "load" else self._through(node, _MEASURED)
        )

    visit_List = visit_Tuple = visit_Dict = _collection


def _is_small_power(base: Any, exponent: Any) -> bool:
    if not isinstance(base, int) or not isinstance(exponent, int):
        return True
    return base.bit_length() * max(0, exponent) <= 4096
