"""A place in a text's tokens, and the grammar of sizes and predicates over it.

An expression is or-terms of and-terms of comparisons of sums. Operands must be of the right sort and divisors
positive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import sympy
from sympy.logic.boolalg import Boolean

from ir.dims import FloorDiv, Table, symbol
from ir.text.expressions import ARITY, CALLS
from ir.text.lexer import Token, tokens

T = TypeVar("T")

MAX_DEPTH = 48
MAX_INT = 2**63

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<=": sympy.Le, "<": sympy.Lt, ">=": sympy.Ge, ">": sympy.Gt, "==": sympy.Eq, "!=": sympy.Ne,
}  # fmt: skip
_KINDS = {
    "value": "a %value", "weight": "a @name", "name": "a name", "int": "an integer", "end": "the text's end",
}  # fmt: skip


class Cursor:
    """The tokens and the index of the next one. Each method raises ParseError where the text does not fit."""

    def __init__(self, text: str) -> None:
        self._tokens = list(tokens(text))
        self._index = 0
        self._depth = 0

    @property
    def next(self) -> Token:
        return self._tokens[self._index]

    def take(self, kind: str | None = None) -> Token:
        token = self.next
        if kind is not None and token.kind != kind:
            raise token.fail(f"expected {_KINDS[kind]}, found {token.text!r}")
        self._index += 1
        return token

    def at(self, *signs: str) -> bool:
        """Whether one of these signs or names is next."""
        return self.next.text in signs and self.next.kind in ("sign", "name")

    def accept(self, text: str) -> bool:
        if self.at(text):
            self._index += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.next.fail(f"expected {text!r}, found {self.next.text!r}")

    def several(self, item: Callable[[], T], end: str) -> tuple[T, ...]:
        """Items separated by commas up to `end`, which is taken."""
        items: list[T] = []
        while not self.accept(end):
            if items:
                self.expect(",")
            items.append(item())
        return tuple(items)

    def named(self, item: Callable[[], tuple[str, T]], end: str) -> dict[str, T]:
        """Like several, of named items whose names differ."""
        items: dict[str, T] = {}
        while not self.accept(end):
            if items:
                self.expect(",")
            token = self.next
            name, value = item()
            if name in items:
                raise token.fail(f"{name} is given twice")
            items[name] = value
        return items

    def integer(self) -> int:
        token = self.take("int")
        if len(token.text) > 19 or int(token.text) > MAX_INT:
            raise token.fail("the integer is larger than 64 bits hold")
        return int(token.text)

    @contextmanager
    def deeper(self) -> Generator[None]:
        """Guards a recursion."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.next.fail(f"nested deeper than {MAX_DEPTH}")
        yield
        self._depth -= 1

    def expression(self) -> Any:
        """A sympy integer expression or predicate."""
        with self.deeper():
            return self._joined("|", sympy.Or, lambda: self._joined("&", sympy.And, self._comparison))

    def number(self) -> Any:
        """An integer expression."""
        token = self.next
        return _number(token, self.expression())

    def _joined(self, sign: str, join: Callable[..., Any], item: Callable[[], Any]) -> Any:
        token = self.next
        items = [item()]
        while self.accept(sign):
            items.append(item())
        return items[0] if len(items) == 1 else _make(token, join, [_truth(token, i) for i in items])

    def _comparison(self) -> Any:
        token = self.next
        if self.accept("~"):
            with self.deeper():
                return _make(token, sympy.Not, [_truth(token, self._comparison())])
        left = self._sum()
        if not self.at(*_COMPARE):
            return left
        sign, right = self.take().text, self._sum()
        return _make(token, _COMPARE[sign], [_number(token, left), _number(token, right)])

    def _sum(self) -> Any:
        token = self.next
        terms = [self._product()]
        while self.at("+", "-"):
            sign = self.take().text
            term = _number(token, self._product())
            terms.append(term if sign == "+" else -term)
        return terms[0] if len(terms) == 1 else _make(token, sympy.Add, [_number(token, t) for t in terms])

    def _product(self) -> Any:
        token = self.next
        if self.accept("-"):
            with self.deeper():
                return -_number(token, self._product())
        found = self._primary()
        while self.at("*", "//"):
            function: Any = sympy.Mul if self.take().text == "*" else FloorDiv
            found = _call(token, function, (found, self._primary()))
        return found

    def _primary(self) -> Any:
        token = self.next
        if token.kind == "int":
            return sympy.Integer(self.integer())
        if self.accept("("):
            inner = self.expression()
            self.expect(")")
            return inner
        name = self.take("name").text
        if name in ("true", "false"):
            return sympy.true if name == "true" else sympy.false
        if name not in CALLS:
            return symbol(name)
        self.expect("(")
        args = self.several(self.expression, ")")
        low, high = ARITY[name]
        if not low <= len(args) <= high:
            wanted = str(low) if low == high else f"{low} or more"
            raise token.fail(f"{name} takes {wanted} arguments, not {len(args)}")
        return _call(token, CALLS[name], args)


def unquote(token: Token, text: str) -> str:
    """The string that a quoted text stands for, JSON's rules."""
    try:
        return str(json.loads(text))
    except json.JSONDecodeError as e:
        raise token.fail(f"malformed string: {e.msg}") from None


def _call(token: Token, function: Any, args: tuple[Any, ...]) -> Any:
    numbers = [_number(token, a) for a in args]
    if function in _DIVISIONS and numbers[1].is_Integer and numbers[1] <= 0:
        raise token.fail(f"the divisor {numbers[1]} is not positive")
    if function is Table and not (numbers[0].is_Integer and numbers[0] >= 0):
        raise token.fail(f"Table's first argument is the number of a table, not {numbers[0]}")
    return _make(token, function, numbers)


_DIVISIONS = (FloorDiv, CALLS["ceildiv"], CALLS["mod"])


def _make(token: Token, function: Any, args: list[Any]) -> Any:
    """function(*args); whatever sympy has against it is a ParseError."""
    try:
        return function(*args)
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as e:
        raise token.fail(str(e)) from None


def _is_truth(e: Any) -> bool:
    return isinstance(e, Boolean) and not isinstance(e, sympy.Symbol)  # sympy's symbols are both


def _truth(token: Token, e: Any) -> Any:
    if not _is_truth(e):
        raise token.fail(f"{e} is a number where a condition is needed")
    return e


def _number(token: Token, e: Any) -> Any:
    if _is_truth(e):
        raise token.fail(f"{e} is a condition where a number is needed")
    return e
