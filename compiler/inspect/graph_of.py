"""A stage's text as a graph."""

from __future__ import annotations

from compiler.errors import CompileError
from compiler.inspect.stages import StageFile
from ir.graph import Graph
from ir.text import ParseError, parse
from runtime.artifact import Artifact


def graph_of(artifact: Artifact, stage: StageFile) -> Graph:
    """Raises CompileError where another version of Octavo wrote it."""
    try:
        return parse(stage.read(artifact))
    except ParseError as error:
        raise CompileError(
            f"not a graph that this version of Octavo reads: {error}",
            where=f"{artifact.root}/{stage.file}",
            todo="Compile the model again",
        ) from error
