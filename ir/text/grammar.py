"""The grammar of sizes and predicates: or-terms of and-terms of comparisons of sums of products.

Operands must be of the right sort and divisors positive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy

from ir.dims import FloorDiv, Table, is_condition, normalize, symbol
from ir.text.cursor import Cursor
from ir.text.expressions import ARITY, CALLS
from ir.text.lexer import Token

# Sizes of real models have a few parts. What sympy does with more of them takes minutes.
MAX_LEAVES = 256  # numbers and names in an expression, as it is read and multiplied out
MAX_TERMS = 32  # of a product that is multiplied out, and so of a power
MAX_ARGUMENT_TERMS = 16  # of an argument of min, max, mod and the divisions, likewise
MAX_ARGUMENTS = 12

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<=": sympy.Le, "<": sympy.Lt, ">=": sympy.Ge, ">": sympy.Gt, "==": sympy.Eq, "!=": sympy.Ne,
}  # fmt: skip


class ExpressionParser(Cursor):
    """Reads what `ir.text.expressions` prints. Each method raises ParseError where the text does not fit."""

    _nested = 0  # expressions around this one
    _leaves = 0

    def expression(self) -> Any:
        """A sympy integer expression or predicate."""
        token = self.next
        if not self._nested:
            self._leaves = 0
        self._nested += 1
        with self.deeper():
            found = self._joined("|", sympy.Or, lambda: self._joined("&", sympy.And, self._comparison))
        self._nested -= 1
        if not self._nested and _num_leaves(normalize(found)) > MAX_LEAVES:
            raise token.fail(f"multiplied out it has more than {MAX_LEAVES} numbers and names")
        return found

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
        factors = (self._primary(),)
        while self.at("*", "//"):
            if self.take().text == "*":
                factors = (*factors, self._primary())
            else:
                factors = (_call(token, FloorDiv, (_times(token, factors), self._primary())),)
        return _times(token, factors)

    def _primary(self) -> Any:
        token = self.next
        if self.accept("("):
            inner = self.expression()
            self.expect(")")
            return inner
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            raise token.fail(f"an expression of more than {MAX_LEAVES} numbers and names")
        if token.kind == "int":
            return sympy.Integer(self.integer())
        name = self.take("name").text
        if name in ("true", "false"):
            return sympy.true if name == "true" else sympy.false
        if name not in CALLS:
            return symbol(name)
        self.expect("(")
        args = self.several(self.expression, ")")
        least, most = ARITY[name]
        if len(args) < least or (most is not None and len(args) > most):
            wanted = str(least) if least == most else f"{least} or more"
            raise token.fail(f"{name} takes {wanted} arguments, not {len(args)}")
        return _call(token, CALLS[name], args)


def _times(token: Token, factors: tuple[Any, ...]) -> Any:
    """Their product, made at once: sympy sorts all factors each time that it makes one."""
    return factors[0] if len(factors) == 1 else _call(token, sympy.Mul, factors)


def _call(token: Token, function: Any, args: tuple[Any, ...]) -> Any:
    numbers = [_number(token, a) for a in args]
    if function in _DIVISIONS and numbers[1].is_Integer and numbers[1] <= 0:
        raise token.fail(f"the divisor {numbers[1]} is not positive")
    _check_terms(token, function, numbers)
    if function is Table and not (numbers[0].is_Integer and numbers[0] >= 0):
        raise token.fail(f"Table's first argument is the number of a table, not {numbers[0]}")
    return _make(token, function, numbers)


def _check_terms(token: Token, function: Any, args: list[Any]) -> None:
    counts = [_num_terms(a) for a in args]
    if function is sympy.Mul and math.prod(counts) > MAX_TERMS:
        raise token.fail(f"multiplied out it has more than {MAX_TERMS} terms")
    if function is sympy.Mul:
        return
    if len(args) > MAX_ARGUMENTS or max(counts, default=0) > MAX_ARGUMENT_TERMS:
        raise token.fail(f"more than {MAX_ARGUMENTS} arguments, or {MAX_ARGUMENT_TERMS} terms in one")


def _num_terms(e: Any) -> int:
    """Of an expression that is multiplied out; never too few."""
    if isinstance(e, sympy.Add):
        return sum(map(_num_terms, e.args))
    if isinstance(e, sympy.Mul):
        return math.prod(map(_num_terms, e.args))
    if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer):
        return _num_terms(e.base) ** int(e.exp)
    return 1


def _num_leaves(e: Any) -> int:
    """Numbers and names in the text of an expression."""
    if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer):
        return _num_leaves(e.base) * int(e.exp)
    args = getattr(e, "args", ())
    return sum(map(_num_leaves, args)) if args else 1


_DIVISIONS = (FloorDiv, CALLS["ceildiv"], CALLS["mod"])


def _make(token: Token, function: Any, args: list[Any]) -> Any:
    """function(*args); whatever sympy has against it is a ParseError."""
    try:
        return function(*args)
    except (TypeError, ValueError, ArithmeticError, AttributeError, RecursionError) as e:
        raise token.fail(str(e)) from None


def _truth(token: Token, e: Any) -> Any:
    if not is_condition(e):
        raise token.fail(f"{e} is a number where a condition is needed")
    return e


def _number(token: Token, e: Any) -> Any:
    if is_condition(e):
        raise token.fail(f"{e} is a condition where a number is needed")
    return e
