"""Building an artifact's kernels again, from its kernels.json and kernels.py alone, for another device.

python -m codegen.triton.build SOURCE_DIR --target cuda:sm_86 -o OUT
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen.triton.build import SOURCE, Report, build_kernels, kernels_json
from codegen.triton.devices import DEVICES, KIB, Device, UnknownTarget
from codegen.triton.launch import Kernel
from codegen.triton.toolchain import BuildError

# Where a device differs from the nearest one in DEVICES: KiB of shared memory of a block and of an SM, and
# warps of an SM (CUDA programming guide, "Compute Capabilities"; AMD's ISA guides).
SHARED_KIB: dict[str, tuple[int, int, int]] = {
    "sm_86": (99, 100, 48), "sm_89": (99, 100, 48), "sm_120": (99, 100, 48), "sm_121": (99, 100, 48),
    "gfx90a": (64, 64, 32), "gfx950": (160, 160, 32),
}  # fmt: skip
OLDEST = 80


def derived_device(target: str) -> Device:
    """The device of a target, or the nearest older one with the limits that differ. Raises UnknownTarget."""
    for device in DEVICES:
        if device.target == target and not device.interpreted:
            return device
    found = re.fullmatch(r"cuda:(sm_(\d+))|hip:(gfx9[0-9a-f]+)", target)
    if found is None or (found[2] and int(found[2]) < OLDEST):
        raise UnknownTarget(f"{target}: kernels are built for cuda:sm_{OLDEST} and newer, and for hip:gfx9")
    nearest, arch = _nearest(found[2]), found[1] or found[3]
    block, sm, warps = SHARED_KIB.get(
        arch, (nearest.shared_bytes // KIB, nearest.shared_bytes_per_sm // KIB, nearest.warps_per_sm)
    )
    return replace(nearest, target=target, arch=arch, model=arch, shared_bytes=block * KIB,
                   shared_bytes_per_sm=sm * KIB, warps_per_sm=warps)  # fmt: skip


def _nearest(capability: str | None) -> Device:
    if capability is None:
        return next(d for d in DEVICES if d.backend == "hip")
    older = [d for d in DEVICES if d.backend == "cuda" and int(d.arch[3:]) <= int(capability)]
    return max(older, key=lambda d: int(d.arch[3:]))


def rebuild(source: Path, target: str, out: Path, report: Report = lambda done, total: None) -> None:
    """Write OUT/kernels.json, OUT/kernels/kernels.py and the binaries, of the same in SOURCE.

    Raises BuildError, UnknownTarget.
    """
    device = derived_device(target)
    try:
        listed = json.loads((source / "kernels.json").read_text())
        kernels = [_kernel(entry) for entry in listed["kernels"]]
        text = (source / SOURCE).read_bytes()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{source}: not a GPU target's folder of an artifact ({error!r})") from error
    if listed.get("target", "").partition(":")[0] != device.backend:
        raise BuildError(
            f"{source}: its source is for {listed.get('target')}, which {target} cannot run. Compile the "
            f"model with --target {target}"
        )
    (out / SOURCE).parent.mkdir(parents=True, exist_ok=True)
    (out / SOURCE).write_bytes(text)
    built = build_kernels(out, kernels, device, report, fewer_stages=True)
    (out / "kernels.json").write_text(json.dumps(kernels_json(built, device), indent=1) + "\n")


def _kernel(entry: dict[str, Any]) -> Kernel:
    """As kernels.json has it."""
    name = str(entry["name"])
    if not re.fullmatch(r"\w+(\.\d+)?", name):
        raise ValueError(f"a kernel is called {name!r}")
    pairs = {key: tuple((str(n), v) for n, v in entry[key]) for key in ("signature", "constants")}
    return Kernel(
        name=name,
        function=str(entry["function"]),
        signature=pairs["signature"],
        constants=pairs["constants"],
        aligned=tuple(entry["aligned"]),
        num_warps=int(entry["num_warps"]),
        num_stages=int(entry["num_stages"]),
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="codegen.triton.build", description=__doc__)
    parser.add_argument("source", type=Path, help="A GPU target's folder of an artifact.")
    parser.add_argument("--target", required=True, help="cuda:sm_86, hip:gfx90a, ...")
    parser.add_argument("-o", "--out", type=Path, required=True, help="A folder to write.")
    given = parser.parse_args(args)
    try:
        rebuild(given.source, given.target, given.out)
    except (BuildError, UnknownTarget) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
