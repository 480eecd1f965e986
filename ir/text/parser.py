"""Text to graph: a recursive-descent parser of what `ir.text.printer` prints. Nothing is ever evaluated as code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import sympy

from ir.dims import Bounds, FloorDiv, normalize, symbol
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.text.expressions import CALLS
from ir.text.lexer import ParseError, Token, tokens
from ir.types import KV, DType, Stream, Tensor, Type

T = TypeVar("T")

MAX_DEPTH = 64
ELEMENT_TYPES = frozenset(str(d) for d in DType)
MAX_INT = 2**63 - 1

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<=": sympy.Le, "<": sympy.Lt, ">=": sympy.Ge, ">": sympy.Gt, "==": sympy.Eq, "!=": sympy.Ne,
}  # fmt: skip


def parse(text: str) -> Graph:
    """The graph that a text describes; `ir.verify` checks its types.

    Raises ParseError with line and column.
    """
    return _Parser(text).graph()


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(tokens(text))
        self._index = 0
        self._depth = 0
        self._values: dict[str, Value] = {}

    # --- tokens

    @property
    def _next(self) -> Token:
        return self._tokens[self._index]

    def _take(self, kind: str | None = None) -> Token:
        token = self._next
        if kind is not None and token.kind != kind:
            raise token.fail(f"expected {kind}, found {token.text!r}")
        self._index += 1
        return token

    def _accept(self, text: str) -> bool:
        if self._next.text == text and self._next.kind in ("sign", "name"):
            self._index += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._next.fail(f"expected {text!r}, found {self._next.text!r}")

    def _list(self, item: Callable[[], T], end: str) -> tuple[T, ...]:
        """Items separated by commas up to `end`, which is taken."""
        items: list[T] = []
        while not self._accept(end):
            if items:
                self._expect(",")
            items.append(item())
        return tuple(items)

    def _integer(self) -> int:
        token = self._take("int")
        if len(token.text) > 19 or int(token.text) > MAX_INT:
            raise token.fail("the integer is larger than 64 bits hold")
        return int(token.text)

    # --- graph

    def graph(self) -> Graph:
        self._expect("graph")
        name = self._name(self._take("weight").text[1:])
        self._expect("(")
        inputs = self._list(self._declaration, ")")
        dims = dict(self._list(self._dim_bounds, "}")) if self._accept("dims") and self._accept("{") else {}
        arena = self._list(self._size, "]") if self._accept("arena") and self._accept("[") else ()
        self._expect("{")
        ops: list[Op] = []
        while not self._accept("return"):
            ops.append(self._op())
        outputs = () if self._next.text == "}" else self._outputs()
        self._expect("}")
        self._take("end")
        return Graph(name, dims, inputs, tuple(ops), outputs, arena)

    def _outputs(self) -> tuple[Value, ...]:
        found = [self._use()]
        while self._accept(","):
            found.append(self._use())
        return tuple(found)

    @staticmethod
    def _name(text: str) -> str:
        return str(json.loads(text)) if text.startswith('"') else text

    def _declaration(self) -> Value:
        token = self._take("value")
        self._expect(":")
        return self._define(token, self._type())

    def _define(self, token: Token, type: Type) -> Value:
        name = token.text[1:]
        if name in self._values:
            raise token.fail(f"%{name} is defined twice")
        return self._values.setdefault(name, Value(name, type))

    def _use(self) -> Value:
        token = self._take("value")
        if token.text[1:] not in self._values:
            raise token.fail(f"{token.text} is not defined before this line")
        return self._values[token.text[1:]]

    def _dim_bounds(self) -> tuple[str, Bounds]:
        name = self._take("name").text
        self._expect(":")
        low = self._integer()
        self._expect("..")
        return name, (low, self._integer() if self._next.kind == "int" else None)

    def _op(self) -> Op:
        names = [self._take("value")]
        while self._accept(","):
            names.append(self._take("value"))
        self._expect("=")
        kind = self._take("name").text
        args: list[Arg] = []
        while self._next.text not in ("{", ":"):
            if args:
                self._expect(",")
            args.append(self._arg())
        attrs = dict(self._list(self._attribute, "}")) if self._accept("{") else {}
        self._expect(":")
        types = [self._type()]
        while self._accept(","):
            types.append(self._type())
        if len(types) != len(names):
            raise names[0].fail(f"{len(names)} results but {len(types)} types")
        outs = tuple(self._define(n, t) for n, t in zip(names, types, strict=True))
        loc = json.loads(f'"{self._take().text[3:]}"') if self._next.kind == "loc" else ""
        return Op(kind, tuple(args), attrs, outs, loc)

    def _arg(self) -> Arg:
        token = self._next
        if token.kind == "value":
            return self._use()
        if token.kind == "weight":
            self._take()
            self._expect(":")
            return Weight(self._name(token.text[1:]), self._type())
        if self._accept("_"):
            return None
        value = self._attr_value()
        if not isinstance(value, bool | int | float):
            raise token.fail(f"{token.text!r} is not an operand")
        return Scalar(value)

    # --- types

    def _type(self) -> Type:
        token = self._take("name")
        self._expect("[")
        if token.text == "kv":
            return self._kv()
        if token.text not in ELEMENT_TYPES:
            raise token.fail(f"there is no element type {token.text!r}")
        return Tensor(DType(token.text), self._list(self._size, "]"))

    def _size(self) -> Any:
        return normalize(self._expression())

    def _kv(self) -> KV:
        window = None
        if not self._accept("full"):
            self._expect("window")
            window = self._integer()
        self._expect(":")
        streams = self._list(self._stream, ";")
        self._expect("block")
        block = self._integer()
        self._expect(";")
        self._expect("layers")
        layers = self._integer()
        self._expect("]")
        return KV(streams, layers, block, window)

    def _stream(self) -> Stream:
        name, dtype = self._take("name").text, self._take("name")
        if dtype.text not in ELEMENT_TYPES:
            raise dtype.fail(f"there is no element type {dtype.text!r}")
        self._expect("[")
        heads, size = self._list(self._integer, "]")
        return Stream(name, DType(dtype.text), heads, size)

    # --- attributes and expressions

    def _attribute(self) -> tuple[str, Any]:
        name = self._take("name").text
        self._expect("=")
        return name, self._attr_value()

    def _attr_value(self) -> Any:
        token = self._next
        if token.kind == "string":
            return json.loads(self._take().text)
        if token.kind == "float":
            return float(self._take().text)
        if token.kind == "name" and token.text in ("true", "false"):
            self._take()
            return token.text == "true"
        if self._accept("["):
            return self._list(self._attr_value, "]")
        return normalize(self._expression())

    def _expression(self) -> Any:
        """or-terms of and-terms of comparisons of sums."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._next.fail(f"nested deeper than {MAX_DEPTH}")
        found = self._joined("|", sympy.Or, lambda: self._joined("&", sympy.And, self._comparison))
        self._depth -= 1
        return found

    def _joined(self, sign: str, join: Callable[..., Any], item: Callable[[], Any]) -> Any:
        items = [item()]
        while self._accept(sign):
            items.append(item())
        return items[0] if len(items) == 1 else join(*items)

    def _comparison(self) -> Any:
        if self._accept("~"):
            return sympy.Not(self._comparison())
        left = self._sum()
        if self._next.kind == "sign" and self._next.text in _COMPARE:
            return _COMPARE[self._take().text](left, self._sum())
        return left

    def _sum(self) -> Any:
        total = self._product()
        while self._next.text in ("+", "-") and self._next.kind == "sign":
            sign = self._take().text
            term = self._product()
            total = total + term if sign == "+" else total - term
        return total

    def _product(self) -> Any:
        if self._accept("-"):
            return -self._product()
        found = self._primary()
        while self._next.text in ("*", "//") and self._next.kind == "sign":
            sign = self._take().text
            other = self._primary()
            found = found * other if sign == "*" else FloorDiv(found, other)
        return found

    def _primary(self) -> Any:
        token = self._next
        if token.kind == "int":
            return sympy.Integer(self._integer())
        if self._accept("("):
            inner = self._expression()
            self._expect(")")
            return inner
        name = self._take("name").text
        if name in ("true", "false"):
            return sympy.true if name == "true" else sympy.false
        if name in CALLS:
            self._expect("(")
            return self._call(token, CALLS[name], self._list(self._expression, ")"))
        return symbol(name)

    @staticmethod
    def _call(token: Token, function: Any, args: tuple[Any, ...]) -> Any:
        try:
            return cast(Any, function)(*args)
        except (TypeError, ValueError, ZeroDivisionError) as e:
            raise token.fail(str(e)) from None


__all__ = ["ParseError", "parse"]
