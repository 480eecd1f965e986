"""Templates of kernel bodies: Jinja text in templates/, whose hooks are filled in for one op."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent / "templates"


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, **hooks: object) -> str:
    """The statements of a kernel: templates/NAME.py.jinja with its hooks filled in.

    Nothing that comes from a checkpoint may be a hook but numbers and what codegen itself has spelled.
    """
    return _environment().get_template(f"{template}.py.jinja").render(**hooks)
