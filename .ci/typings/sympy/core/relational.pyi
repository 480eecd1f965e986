from typing import Any

from sympy.logic.boolalg import Boolean

class Relational(Boolean):
    lhs: Any
    rhs: Any
    rel_op: str
    negated: Any
    reversed: Any
    def __new__(cls, lhs: Any, rhs: Any) -> Any: ...
