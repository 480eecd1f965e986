"""The op table of docs/ir.md is that of the code: kinds, operands, attributes and their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ir.ops import OPS, REQUIRED
from ir.text.printer import print_attr

TEXT = (Path(__file__).parents[2] / "docs" / "ir.md").read_text()


def rows() -> dict[str, tuple[str, str]]:
    """(operands, attributes) as the table has them, by kind."""
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in TEXT.splitlines() if line[:1] == "|"]
    table = [row for row in cells if len(row) == 4 and row[0] not in ("kind", "---")]
    return {kind: (row[1], row[2]) for row in table for kind in row[0].split()}


def test_every_op_is_there_and_no_other() -> None:
    assert rows().keys() == OPS.keys()


@pytest.mark.parametrize("kind", OPS)
def test_attributes_and_defaults(kind: str) -> None:
    text = rows()[kind][1]
    written = dict(re.findall(r'\b([a-z_]+)(=(?:[\w.]+|"\w*")?|)(?=[, (]|$)', re.sub(r"\([^)]*\)", "", text)))
    defaults = {
        name: "" if value is REQUIRED else f"={'' if value is None else print_attr(value)}"
        for name, value in OPS[kind].attrs.items()
    }
    assert written == defaults


@pytest.mark.parametrize("kind", OPS)
def test_operands(kind: str) -> None:
    text = re.sub(r"\[[^]]*\]|\([^)]*\)|:.*?(?=,|$)| of one float type", "", rows()[kind][0])
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if kind == "kv_write":
        assert names == ("kv", "x*", "slots")
        names = names[:2]  # the slots are the last of x*
    assert names == OPS[kind].operands
