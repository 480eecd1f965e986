"""Writing the engine artifact: a directory beside the target, filled, hashed and then moved into place.

The format is docs/artifact.md. Until the last rename nothing of a compile is visible at the artifact's path,
so that a compile which is interrupted or killed leaves what was there before.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from codegen.scratch import is_abandoned, owner_tag
from compiler.errors import CompileError
from compiler.files import read_file
from runtime.artifact import MAX_MANIFEST
from runtime.hashes import file_hash, manifest_digest
from runtime.manifest import FORMAT, VERSION

Report = Callable[[int, int], None]
OLD = ".old"  # ends the name of what was moved aside
TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
TRIES = 100


class ArtifactWriter:
    """A context in which an artifact is filled; leaving it without `publish` removes every trace.

    Raises CompileError where `out` cannot be written, or is not an artifact and `force` is not set.
    """

    def __init__(self, out: Path, force: bool = False) -> None:
        self.out = Path(os.path.abspath(out))
        self.force = force
        self.root = self.out.parent / f".{self.out.name}.partial-{owner_tag()}"
        check_replaceable(self.out, force)

    def __enter__(self) -> ArtifactWriter:
        remove_abandoned(self.out)
        self.root.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def path(self, relative: str) -> Path:
        """Where a file of the artifact is written; its directory is made."""
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, relative: str, content: str | bytes) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.path(relative).write_bytes(data)

    def relative(self, path: Path) -> str:
        """A written file's path as the manifest spells it."""
        return path.resolve().relative_to(self.root.resolve()).as_posix()

    def seal(self, manifest: dict[str, Any], report: Report = lambda done, total: None) -> None:
        """Complete the manifest with hashes and digest and write it; no file may change from here on.

        report(done, total) counts bytes.
        """
        head = {"format": FORMAT, "version": _version(manifest)}
        manifest = {**head, **manifest, "files": hash_files(self.root, report)}
        manifest["digest"] = manifest_digest(manifest)
        self.write("manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")

    def publish(self) -> Path:
        """Move the sealed artifact into place. Raises CompileError if meanwhile something else came there."""
        check_replaceable(self.out, self.force)
        replace_directory(self.root, self.out)
        return self.out


def _version(manifest: Mapping[str, Any]) -> int:
    """Of the format: the earliest that has what the artifact needs. From 3 on there are states."""
    return VERSION if any(group.get("state") for group in manifest.get("kv_groups", ())) else 2


def check_replaceable(out: Path, force: bool) -> None:
    """Refuse to replace anything that is not an artifact."""
    if not out.parent.is_dir():
        raise CompileError("there is no such directory to write to", where=str(out.parent), todo="Make it")
    if not os.access(out.parent, os.W_OK):
        raise CompileError("not writable", where=str(out.parent), todo="Choose another place with -o")
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        todo = "Choose another with -o, or remove it"
        raise CompileError("exists and is not a directory", where=str(out), todo=todo)
    if force or is_artifact(out) or not any(out.iterdir()):
        return
    todo = "Choose another with -o, or replace it with --force"
    raise CompileError("exists and is not an engine artifact", where=str(out), todo=todo)


def check_apart(source: Path, out: Path) -> None:
    """Refuse to replace the checkpoint that is read, or a directory that holds it, by force or not."""
    read, written = source.resolve(), out.resolve()
    if written == read or written in read.parents:
        todo = "Choose another place with -o"
        raise CompileError("the checkpoint lies there, which is not replaced", where=str(out), todo=todo)


def is_artifact(path: Path) -> bool:
    """Whether a directory has a manifest that calls it an engine artifact, of whatever version."""
    try:
        manifest = json.loads(read_file(path / "manifest.json", MAX_MANIFEST))
    except (CompileError, OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def remove_abandoned(out: Path) -> None:
    """Remove what killed compiles of the same artifact left behind, and put back what one had moved aside."""
    prefix = f".{out.name}.partial-"
    for path in out.parent.glob(f"{glob.escape(prefix)}*"):
        tag = path.name.removeprefix(prefix)
        if not is_abandoned(path, tag.removesuffix(OLD)):
            continue
        if tag.endswith(OLD) and not out.exists():
            path.rename(out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def replace_directory(new: Path, out: Path) -> None:
    """Move `new` to `out` in one step; what was there stays readable to those who have it open, and is
    removed. Whoever else does the same at once comes before or after.
    """
    for _ in range(TRIES):
        try:
            os.rename(new, out)  # onto nothing, or an empty directory
            return
        except OSError as error:
            if error.errno not in TAKEN:
                raise
        if _exchange(new, out):
            shutil.rmtree(new, ignore_errors=True)
            return
        if _replace_in_two_steps(new, out):
            return
    raise CompileError("it is replaced by other compiles all the time", where=str(out), todo="Try again")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories at once (Linux's renameat2); False where the system or the file system cannot."""
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(here, bytes(first), here, bytes(second), exchange) == 0


def _replace_in_two_steps(new: Path, out: Path) -> bool:
    """For an instant nothing is at `out`. False where another process was there in that instant."""
    old = new.with_name(new.name + OLD)
    try:
        os.rename(out, old)
    except FileNotFoundError:
        return False
    try:
        os.rename(new, out)
    except OSError as error:
        if error.errno in TAKEN:
            shutil.rmtree(old, ignore_errors=True)
            return False
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return True


def hash_files(root: Path, report: Report = lambda done, total: None) -> dict[str, dict[str, Any]]:
    """Bytes and hash of every file under `root` but the manifest, by relative path."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != root / "manifest.json")
    sizes = {file: file.stat().st_size for file in files}
    total, done, found = sum(sizes.values()), 0, dict[str, dict[str, Any]]()
    for file, num_bytes in sizes.items():
        sha256 = file_hash(file, lambda hashed, before=done: report(before + hashed, total))
        found[file.relative_to(root).as_posix()] = {"bytes": num_bytes, "sha256": sha256}
        done += num_bytes
    return found
