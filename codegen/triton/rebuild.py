"""Building an artifact's kernels again, from its kernels.json and kernels.py alone, for another device.

python -m codegen.triton.build SOURCE_DIR --target cuda:sm_86 -o OUT
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from codegen.triton.build import SOURCE, Report, build_kernels, kernels_json
from codegen.triton.devices import UnknownTarget, derived_device
from codegen.triton.launch import Kernel
from codegen.triton.toolchain import BuildError


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
        what = f"not a GPU target's folder of an artifact ({error!r})"
        todo = "Give NAME.octavo/targets/TARGET"
        raise BuildError(what, where=str(source), todo=todo) from error
    if listed.get("target", "").partition(":")[0] != device.backend:
        raise BuildError(
            f"its source is for {listed.get('target')}, which {target} cannot run",
            where=str(source),
            todo=f"Compile the model with --target {target}",
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
