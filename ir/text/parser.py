"""Text to graph: a recursive-descent parser of what `ir.text.printer` prints. No text is run as code."""

from __future__ import annotations

from typing import Any

import sympy

from ir.dims import Bounds, normalize
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.ops.base import ELEMENT_TYPES
from ir.text.cursor import MAX_INT, unquote
from ir.text.grammar import ExpressionParser
from ir.text.lexer import ParseError, Token
from ir.types import CHANNEL, KV, TOKEN, DType, Stream, Tensor, Type


def parse(text: str) -> Graph:
    """The graph that a text describes; `ir.verify` checks its types.

    Raises ParseError with line and column.
    """
    return _Parser(text).graph()


class _Parser(ExpressionParser):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values: dict[str, Value] = {}

    def graph(self) -> Graph:
        self.expect("graph")
        name = _name(self.take("weight"))
        self.expect("(")
        inputs = self.several(self._declaration, ")")
        dims: dict[str, Bounds] = {}
        arena: tuple[Any, ...] = ()
        if self.accept("dims"):
            self.expect("{")
            dims = self.named(self._dim_bounds, "}")
        if self.accept("arena"):
            self.expect("[")
            arena = self.several(self._size, "]")
        self.expect("{")
        ops: list[Op] = []
        while not self.accept("return"):
            ops.append(self._op())
        outputs = self._body_end()
        return Graph(name, dims, inputs, tuple(ops), outputs, arena)

    def _body_end(self) -> tuple[Value, ...]:
        found = () if self.at("}") else (self._use(),)
        while found and self.accept(","):
            found = (*found, self._use())
        self.expect("}")
        self.take("end")
        return found

    def _declaration(self) -> Value:
        token = self.take("value")
        self.expect(":")
        return self._define(token, self._type())

    def _define(self, token: Token, type: Type) -> Value:
        name = _name(token)
        if name in self._values:
            raise token.fail(f"{token.text} is defined twice")
        return self._values.setdefault(name, Value(name, type))

    def _use(self) -> Value:
        token = self.take("value")
        found = self._values.get(_name(token))
        if found is None:
            raise token.fail(f"{token.text} is not defined before this line")
        return found

    def _dim_bounds(self) -> tuple[str, Bounds]:
        name = self.take("name").text
        self.expect(":")
        low = self.integer()
        self.expect("..")
        return name, (low, self.integer() if self.next.kind == "int" else None)

    def _op(self) -> Op:
        names = [self.take("value")]
        while self.accept(","):
            names.append(self.take("value"))
        self.expect("=")
        kind = self.take("name").text
        args: list[Arg] = []
        while not self.at("{", ":"):
            if args:
                self.expect(",")
            args.append(self._arg())
        attrs = self.named(self._attribute, "}") if self.accept("{") else {}
        self.expect(":")
        types = [self._type()]
        while self.accept(","):
            types.append(self._type())
        if len(types) != len(names):
            raise names[0].fail(f"{len(names)} results but {len(types)} types")
        outs = tuple(self._define(n, t) for n, t in zip(names, types, strict=True))
        return Op(kind, tuple(args), attrs, outs, self._loc())

    def _loc(self) -> str:
        if self.next.kind != "loc":
            return ""
        token = self.take()
        return unquote(token, f'"{token.text[3:]}"')

    def _arg(self) -> Arg:
        token = self.next
        if token.kind == "value":
            return self._use()
        if token.kind == "weight":
            self.take()
            self.expect(":")
            return Weight(_name(token), self._type())
        if self.accept("_"):
            return None
        value = self._attr_value()
        if not isinstance(value, bool | int | float):
            raise token.fail(f"{token.text!r} is not an operand")
        return Scalar(value)

    # --- types

    def _type(self) -> Type:
        token = self.take("name")
        if token.text == "kv":
            self.expect("[")
            return self._kv()
        dtype = _element_type(token)
        self.expect("[")
        return Tensor(dtype, self.several(self._size, "]"))

    def _size(self) -> Any:
        token = self.next
        found = _written(token, normalize(self.number()))
        if isinstance(found, int) and not 0 <= found < MAX_INT:
            raise token.fail(f"{found} is not a size")
        return found

    def _kv(self) -> KV:
        window, tail, state = None, self.accept("tail"), self.accept("state")
        if not tail and not state and not self.accept("full"):
            self.expect("window")
            window = self.integer()
        self.expect(":")
        streams = self.several(self._stream, ";")
        self.expect("block")
        block = self.integer()
        self.expect(";")
        self.expect("layers")
        layers = self.integer()
        self.expect("]")
        return KV(streams, layers, block, window, tail, state)

    def _stream(self) -> Stream:
        name, dtype, per, per_block = self.take("name").text, _element_type(self.take("name")), TOKEN, False
        if self.accept("per"):
            per_block = self.accept("block")
            if not per_block:
                self.expect(CHANNEL)
                per = CHANNEL
        self.expect("[")
        heads = self.integer()
        self.expect(",")
        size = self.integer()
        self.expect("]")
        return Stream(name, dtype, heads, size, per, per_block)

    # --- attributes

    def _attribute(self) -> tuple[str, Any]:
        name = self.take("name").text
        self.expect("=")
        return name, self._attr_value()

    def _attr_value(self) -> Any:
        token = self.next
        if token.kind == "string":
            return unquote(token, self.take().text)
        if token.kind == "float":
            return float(self.take().text)
        if self.at("true", "false"):
            return self.take().text == "true"
        if self.accept("["):
            with self.deeper():
                return self.several(self._attr_value, "]")
        return _written(token, normalize(self.expression()))


def _written(token: Token, found: Any) -> Any:
    """An expression whose numbers the text can hold, now that it is multiplied out."""
    numbers = found.atoms(sympy.Integer) if isinstance(found, sympy.Basic) else {found}
    if any(abs(int(n)) > MAX_INT for n in numbers):
        raise token.fail("multiplied out it has numbers larger than 64 bits hold")
    return found


def _name(token: Token) -> str:
    text = token.text[1:]
    return unquote(token, text) if text.startswith('"') else text


def _element_type(token: Token) -> DType:
    if token.text not in ELEMENT_TYPES:
        raise token.fail(f"there is no element type {token.text!r}; there are {sorted(ELEMENT_TYPES)}")
    return DType(token.text)


__all__ = ["ParseError", "parse"]
