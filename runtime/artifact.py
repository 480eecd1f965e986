"""An artifact directory on disk: found, checked, and read from nowhere else. See docs/artifact.md.

Hashes are integrity, not trust: an artifact holds code that will run. To trust one, compare its digest with
one that came another way (`digest=`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from runtime import machine
from runtime.errors import ArtifactError, shown
from runtime.hashes import file_hash
from runtime.manifest import CpuTarget, FileEntry, Kernel, Manifest, Target, parse_manifest

MAX_MANIFEST = 16 << 20
MAX_FILE = 256 << 20  # of one that is read into memory
Verify = Literal["full", "fast"]
Report = Callable[[int, int], None]
TRIES = 10  # to open what compiles replace
_GIVE = "Give the directory that `octavo compile -o` wrote"
_COPY = "Get an undamaged copy, or compile the model again"


@dataclass(frozen=True)
class Artifact:
    """place: which directory was opened; a compile may put another under the same name."""

    root: Path
    manifest: Manifest
    place: tuple[int, int] | None = None

    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        verify: Verify = "full",
        digest: str | None = None,
        report: Report | None = None,
    ) -> Artifact:
        """Read the manifest and check the files: all of them, or with verify="fast" all but the weights.

        digest: the digest that the manifest must have, with or without "sha256:". report(done, total) is told
        how many bytes were hashed.
        """
        if not isinstance(verify, str) or verify not in ("full", "fast"):
            todo = "Use 'full' or 'fast'"
            raise ArtifactError(f"verify = {shown(verify)}", where="load", todo=todo)
        if digest is not None and not isinstance(digest, str):
            todo = "Give the text that octavo inspect prints"
            raise ArtifactError(f"digest = {shown(digest)}", where="load", todo=todo)
        root = _directory(path)
        for _ in range(TRIES - 1):
            place = _place(root)
            try:
                return Artifact._opened(root, place, verify, digest, report)
            except ArtifactError:
                if _place(root) == place:
                    raise  # it is damaged, and not another by now
        return Artifact._opened(root, _place(root), verify, digest, report)

    @staticmethod
    def _opened(
        root: Path, place: tuple[int, int] | None, verify: Verify, digest: str | None, report: Report | None
    ) -> Artifact:
        manifest = parse_manifest(_read(root, "manifest.json", MAX_MANIFEST))
        if (
            digest is not None
            and manifest.digest.removeprefix("sha256:") != digest.removeprefix("sha256:").lower()
        ):
            raise ArtifactError(
                f"the digest is {manifest.digest}, not the given {shown(digest, 80)}",
                where=str(root),
                todo="This is not the artifact that was expected: do not run it",
            )
        artifact = Artifact(root, manifest, place)
        artifact.check_files(weights=verify == "full", report=report)
        artifact.check_place()
        return artifact

    @property
    def is_replaced(self) -> bool:
        """Whether another artifact is at its path by now, as after a compile to the same name."""
        return self.place is not None and _place(self.root) != self.place

    def check_place(self) -> None:
        """Raises ArtifactError where it is replaced: files of two artifacts would be mixed."""
        if self.is_replaced:
            what = "another artifact was put in its place while it was read"
            raise ArtifactError(what, where=str(self.root), todo="Try again")

    def target(self, name: str) -> Target:
        """What was compiled for a target, by the name that --target takes."""
        if not isinstance(name, str) or name not in self.manifest.targets:
            built = ", ".join(self.manifest.targets) or "none"
            raise ArtifactError(
                f"no target {shown(name)} (built: {built})",
                where=str(self.root),
                todo="Load it for one that is there, or compile the model for one of `octavo compile --help`",
            )
        return self.manifest.targets[name]

    @property
    def cpu(self) -> CpuTarget:
        return cast(CpuTarget, self.target("cpu"))

    def weights(self, name: str = "cpu") -> str:
        """The file of a target's weights. Raises ArtifactError where there are shapes alone."""
        found = self.target(name).weights
        if found is None:
            raise ArtifactError(
                "it has no weights: it was compiled from shapes alone",
                where=str(self.root),
                todo="Inspect it, or compile a checkpoint without --no-weights",
            )
        return found

    def path(self, name: str) -> Path:
        """The place of a file that the manifest lists."""
        if not isinstance(name, str) or name not in self.manifest.files:
            what = f"{shown(name)} is not in the manifest's list of files"
            raise ArtifactError(what, where=str(self.root), todo=_COPY)
        return _locate(self.root, name)

    def read(self, name: str, limit: int = MAX_FILE) -> bytes:
        self.path(name)
        try:
            return _read(self.root, name, limit)
        finally:
            self.check_place()

    def check_files(self, *, weights: bool, report: Report | None = None) -> None:
        """Compare sizes of all files, and SHA-256s of all or of all but the weights."""
        skip = set[str]() if weights else self.manifest.weight_files
        total = sum(entry.bytes for name, entry in self.manifest.files.items() if name not in skip)
        done, told = 0, report or (lambda done, total: None)
        for name, entry in self.manifest.files.items():
            place = _locate(self.root, name)
            size = place.stat().st_size
            if size != entry.bytes:
                raise ArtifactError(
                    f"{size} bytes, the manifest says {entry.bytes}", where=str(place), todo=_COPY
                )
            if name not in skip:
                _check_hash(place, entry, lambda hashed, before=done: told(before + hashed, total))
                done += size

    def draft(self) -> CpuTarget:
        """The CPU target's own. Raises ArtifactError where it was compiled without."""
        if self.cpu.draft is None:
            raise ArtifactError(
                "it has no draft of its own",
                where=str(self.root),
                todo="Compile the model again with octavo compile --draft self:int4, or draft with 'lookup'",
            )
        return self.cpu.draft

    def draft_kernel(self, isa: str | None = None) -> Kernel:
        """The draft's of the level that the target uses, or where it has none of that its best."""
        levels = {kernel.isa for kernel in self.draft().kernels}
        return self.kernel(isa if isa in levels else None, self.draft())

    def kernel(self, isa: str | None = None, target: CpuTarget | None = None) -> Kernel:
        """The first kernel that this CPU can run, or the one named `isa`. target: the CPU's, or its draft."""
        if isa is not None and not isinstance(isa, str):
            todo = "Give a level's name: octavo inspect prints them"
            raise ArtifactError(f"isa = {shown(isa)}", where="load", todo=todo)
        have, arch = machine.cpu_features(), machine.arch()
        missing: list[str] = []
        kernels = (target or self.cpu).kernels
        for kernel in kernels:
            if isa is not None and kernel.isa != isa:
                continue
            lacks = [f for f in kernel.features if machine.spelling(f) not in have]
            if kernel.arch == arch and not lacks:
                return kernel
            missing.append(
                f"{kernel.isa} needs " + (", ".join(lacks) if kernel.arch == arch else kernel.arch)
            )
        have_isas = ", ".join(kernel.isa for kernel in kernels) or "none"
        why = "; ".join(missing) or f"it has no kernel {isa or 'at all'} (built: {have_isas})"
        raise ArtifactError(
            f"no kernel for this CPU ({arch}): {why}",
            where=str(self.root),
            todo="Compile for this CPU's level, or rebuild from the bundled source",
        )


def _check_hash(place: Path, entry: FileEntry, report: Callable[[int], None]) -> None:
    try:
        found = file_hash(place, report)
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror})", where=str(place), todo=_COPY) from error
    if found != entry.sha256:
        raise ArtifactError(
            f"SHA-256 is {found}, the manifest says {entry.sha256}", where=str(place), todo=_COPY
        )


def _directory(path: str | os.PathLike[str]) -> Path:
    try:
        root = Path(path)
        if not root.is_dir():
            kind = "not a directory" if root.exists() else "it does not exist"
            raise ArtifactError(kind, where=str(root), todo=_GIVE)
        if not (root / "manifest.json").is_file():
            raise ArtifactError("it has no manifest.json", where=str(root), todo=_GIVE)
        return root.resolve()
    except TypeError:
        raise ArtifactError("not a path", where=f"engine = {shown(path)}", todo=_GIVE) from None
    except (OSError, ValueError) as error:  # a name that is too long; a NUL in it
        what = f"cannot be read ({getattr(error, 'strerror', error)})"
        raise ArtifactError(what, where=shown(str(path)), todo=_GIVE) from error


def _place(root: Path) -> tuple[int, int] | None:
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _locate(root: Path, name: str) -> Path:
    """The file, after looking at each step of its path: no symbolic link, and a regular file at the end."""
    place = root
    for part in name.split("/"):
        place = place / part
        try:
            mode = place.lstat().st_mode
        except OSError as error:
            raise ArtifactError(f"cannot be read ({error.strerror})", where=str(place), todo=_COPY) from error
        if stat.S_ISLNK(mode):
            raise ArtifactError(
                "is a symbolic link", where=str(place), todo="Copy the artifact with plain files"
            )
    if not stat.S_ISREG(mode):
        raise ArtifactError("is not a regular file", where=str(place), todo=_COPY)
    return place


def _read(root: Path, name: str, limit: int) -> bytes:
    place = _locate(root, name)
    size = place.stat().st_size
    if size > limit:
        raise ArtifactError(f"{size} bytes; at most {limit} are read", where=str(place), todo=_COPY)
    try:
        return place.read_bytes()
    except OSError as error:
        raise ArtifactError(f"cannot be read ({error.strerror})", where=str(place), todo=_COPY) from error
