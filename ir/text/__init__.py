"""The IR's text form."""

from ir.text.lexer import ParseError
from ir.text.parser import parse
from ir.text.printer import print_attr, print_graph, print_op, print_type

__all__ = ["ParseError", "parse", "print_attr", "print_graph", "print_op", "print_type"]
