"""One page that shows an artifact: opened from a file, it loads nothing else.

The data is JSON in the page, and the page's script makes text of it, never markup. A policy in the page's
head names the script's and the style's hashes: nothing else runs, and nothing is fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

from compiler.inspect.content import Step, content
from runtime.artifact import Artifact

SCRIPTS = ("dom", "model", "overview", "arcs", "details", "graph", "diff", "memory", "kernels", "main")


def page(artifact: Artifact, step: Step) -> tuple[str, dict[str, Any]]:
    """The page, and what it holds. step: requests, cached tokens and new tokens, as of step_shapes."""
    data = content(artifact, step)
    folder = files("compiler.inspect").joinpath("page")
    script = "\n" + "\n".join(folder.joinpath(f"{name}.js").read_text() for name in SCRIPTS)
    style = "\n" + folder.joinpath("page.css").read_text()
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        "title": html.escape(artifact.manifest.name),
        "style": style,
        "data": script_json(data),
        "script": script,
    }
    text, done = folder.joinpath("page.html").read_text(), ""
    for name, part in parts.items():  # in the page's order: what was put in is not looked at again
        before, _, text = text.partition(f"[[{name}]]")
        done += before + part
    return done + text, {"stages": len(data["stages"]), "graphs": len(data["graphs"])}


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def script_json(data: Any) -> str:
    """JSON that ends no script element, and starts no comment in one."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
