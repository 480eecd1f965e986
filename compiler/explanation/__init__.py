"""What the compiler makes of a model, layer by layer, or the first reason why it refuses it."""

from compiler.explanation.collect import Asked, explain
from compiler.explanation.facts import Explanation

__all__ = ["Asked", "Explanation", "explain"]
