"""The stages of an artifact: the graph after each pass, as text, and that of each target."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.errors import CompileError
from runtime.manifest import CpuTarget

if TYPE_CHECKING:
    from runtime.artifact import Artifact

TODO = "Compile the model with --dump-ir DIR to keep the graph after every pass"


@dataclass(frozen=True)
class StageFile:
    """name: 09-fuse_norm, of a pass (draft-09-fuse_norm: of the draft's); or graph, or graph-TARGET where
    there are several targets; or graph-draft.
    """

    name: str
    file: str

    @property
    def number(self) -> int | None:
        number, _, rest = self.name.partition("-")
        return int(number) if rest and number.isdecimal() else None

    def is_called(self, wanted: str) -> bool:
        """Whether `wanted` is its name, its number or its pass."""
        number, _, name = self.name.partition("-")
        by_number = wanted.isdecimal() and self.number == int(wanted)
        return wanted == self.name or by_number or (self.number is not None and wanted == name)

    def read(self, artifact: Artifact) -> str:
        return artifact.read(self.file).decode()


def stages(artifact: Artifact, target: str | None = None) -> list[StageFile]:
    """In the order of the passes; those before a target's graph are there only after --dump-ir.

    The last, `graph`, is the target's, or the first target's.
    """
    dumped = sorted(name for name in artifact.manifest.files if name.startswith("stages/"))
    found = [StageFile(name.removeprefix("stages/").removesuffix(".ir"), name) for name in dumped]
    targets = artifact.manifest.targets
    if len(targets) > 1:
        found += [StageFile(f"graph-{name.replace(':', '-')}", each.graph) for name, each in targets.items()]
    found += [
        StageFile("graph-draft", each.draft.graph)
        for each in targets.values()
        if isinstance(each, CpuTarget) and each.draft
    ]
    return [*found, StageFile("graph", artifact.target(target or next(iter(targets))).graph)]


def find_stage(artifact: Artifact, wanted: str, target: str | None = None) -> StageFile:
    """By name, number or pass. Raises CompileError where none is called so, or several are."""
    available = stages(artifact, target)
    matches = [stage for stage in available if stage.is_called(wanted)]
    if len(matches) == 1:
        return matches[0]
    where = str(artifact.root)
    if matches:
        names = ", ".join(stage.name for stage in matches)
        raise CompileError(f"{wanted!r} is {len(matches)} stages: {names}", where=where, todo="Give a number")
    names = [name for stage in available for name in (stage.name, stage.name.partition("-")[2])]
    if near := difflib.get_close_matches(wanted, names, 1):
        todo = f"The nearest is {near[0]}; --stages lists them"
        raise CompileError(f"has no stage {wanted!r}", where=where, todo=todo)
    has = ", ".join(stage.name for stage in available)
    todo = TODO if len(available) == 1 else "Name one of them, or give its number"
    raise CompileError(f"has no stage {wanted!r}; it has {has}", where=where, todo=todo)


def count_ops(text: str) -> int:
    """Of a printed graph: one a line. Cheaper than parsing it."""
    return sum(line.startswith("  %") for line in text.splitlines())
