"""Virtual environments of the peers, made once each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sidebyside.peers import Peer


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def create(peer: Peer, folder: Path) -> Path:
    """The peer's environment's interpreter; installs what it needs unless that was done before."""
    wanted = "\n".join(" ".join(command) for command in peer.commands)
    done = folder / "installed"
    if not done.exists() or done.read_text() != wanted:
        print(f"installing {peer.title} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        for command in peer.commands:
            subprocess.run([python_of(folder), "-m", "pip", *command, "--quiet"], check=True)
        done.write_text(wanted)
    return python_of(folder)
