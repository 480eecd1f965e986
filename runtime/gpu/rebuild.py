"""Kernels built again for another GPU than the artifact's: once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from runtime.artifact import Artifact
from runtime.errors import ArtifactError
from runtime.gpu.device import KernelSpec
from runtime.gpu.kernels import parse_kernels
from runtime.manifest import GpuTarget

LOG = logging.getLogger("octavo")


def cache_folder() -> Path:
    """$OCTAVO_CACHE/rebuilt, by default in the user's cache folder. Raises ArtifactError."""
    if given := os.environ.get("OCTAVO_CACHE"):
        return Path(given) / "rebuilt"
    try:
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home
        todo = "Set OCTAVO_CACHE to a folder for them"
        what = "there is no place to keep kernels built for this GPU"
        raise ArtifactError(what, where="the home folder", todo=todo) from error
    return Path(user) / "octavo/rebuilt"


def rebuilt(artifact: Artifact, target: GpuTarget, wanted: str, device: str) -> Sequence[KernelSpec]:
    """The kernels, with binaries for `wanted`, a target's name. Takes a compiler, the first time, and says
    so. Raises ArtifactError.
    """
    todo = f"Compile the model with --target {wanted}"
    if find_spec("triton") is None:
        raise ArtifactError(
            f"its target {target.name} has no binaries for {device} ({wanted}), and Triton is not here to "
            "build them",
            where=artifact.root.name,
            todo=f"Install it (pip install 'octavo[compile,triton]'), or {todo[0].lower()}{todo[1:]}",
        )
    folder = cache_folder() / _key(artifact, target, wanted)
    with suppress(OSError, ArtifactError):  # not there, or damaged
        return _read(folder)
    LOG.warning("octavo: building the kernels of %s for %s (%s), once", artifact.root.name, device, wanted)
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        _build(artifact.path(target.kernels).parent, wanted, partial, todo)
        _publish(partial, folder)
        return _read(folder)
    except OSError as error:
        raise ArtifactError(
            f"its kernels for {wanted} cannot be kept ({error})", where=str(folder), todo="Set OCTAVO_CACHE"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _key(artifact: Artifact, target: GpuTarget, wanted: str) -> str:
    """Of all that the binaries depend on."""
    for name in (target.kernels, target.source):
        artifact.path(name)  # it must be listed
    hashes = [artifact.manifest.files[name].sha256 for name in (target.kernels, target.source)]
    text = json.dumps([hashes, wanted, _triton_version()])
    return hashlib.sha256(text.encode()).hexdigest()


def _triton_version() -> str:
    """Of whatever package it came in: PyTorch ships it under names of its own."""
    with suppress(PackageNotFoundError):
        return version("triton")
    names = packages_distributions().get("triton", [])  # slow
    return version(names[0]) if names else ""


def _build(source: Path, wanted: str, out: Path, todo: str) -> None:
    """In a process of its own: it imports the compiler."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "codegen.triton.build", str(source), "--target", wanted, "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ArtifactError(f"its kernels cannot be built for {wanted}: {said}", where=str(source), todo=todo)


def _publish(partial: Path, folder: Path) -> None:
    """Unless another process was first. What is there and damaged is replaced."""
    try:
        partial.rename(folder)
    except OSError:
        with suppress(OSError, ArtifactError):
            _read(folder)
            return
        old = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _read(folder: Path) -> Sequence[KernelSpec]:
    data = (folder / "kernels.json").read_bytes()
    return parse_kernels(data, str(folder), lambda name: (folder / name).read_bytes())
