"""No code decides by the name of a model: neither a model type nor a class of transformers is compared.

What stands in a comparison, a match, a subscript, a key of a table or a call that looks for text is looked
at; docstrings and messages may name models.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

ROOT = Path(__file__).parent.parent
FILES = [p for package in ("compiler", "ir", "passes", "codegen", "runtime")
         for p in sorted((ROOT / package).rglob("*.py"))]  # fmt: skip
# What other things are called too: fields of configurations, ops, our own commands and packages.
WORDS = {"text", "mask", "data", "vision", "speech", "beam", "clip", "codegen", "opt", "mamba", "flex"}
TYPES = {name.lower() for name in CONFIG_MAPPING_NAMES} - WORDS
TABLES = (CONFIG_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES)
CLASSES = {c.lower() for table in TABLES for names in table.values()
           for c in ([names] if isinstance(names, str) else names)}  # fmt: skip
# Of qwen2 and llama, but not of seed_oss: what a name of that family begins with.
FAMILIES = {
    m[1] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if (m := re.match(r"([a-z]{3,})(_?v?\d|$)", name))
} - WORDS
SEARCHES = {"startswith", "endswith", "find", "count", "index", "match", "search", "fullmatch", "isinstance",
            "get", "removeprefix"}  # fmt: skip


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every literal that something is compared with, or looked up by."""
    for node in ast.walk(tree):
        held: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            held = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            held = [node.pattern]
        elif isinstance(node, ast.Subscript):
            held = [node.slice]
        elif isinstance(node, ast.Dict):
            held = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            held = list(node.elts)
        elif isinstance(node, ast.Call) and _called(node) in SEARCHES:
            held = list(node.args)
        for part in held:
            for each in ast.walk(part):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.lineno, each.value


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def named(text: str) -> bool:
    """Whether a literal is a model type or a class, or begins with a family's name."""
    word = text.lower().strip("^$.*_- ")
    first = re.match("[a-z]*", word)[0]  # type: ignore[index]
    return word in TYPES or word in CLASSES or first in FAMILIES


def violations(source: str) -> list[tuple[int, str]]:
    return sorted({found for found in compared(ast.parse(source)) if named(found[1])})


def test_no_line_compares_a_model_type_or_class() -> None:
    found = {p.relative_to(ROOT).as_posix(): violations(p.read_text()) for p in FILES}
    assert len(found) > 100 and not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        'if config.model_type == "llama": pass',
        'if "mixtral" in name: pass',
        'if type(model).__name__ == "LlamaForCausalLM": pass',
        'if name in ("gpt2", "opt"): pass',
        'if kind.startswith("gemma"): pass',
        'scale = {"gemma2": 2.0}[model_type]',
        'table = {"QWEN2": 1}',
        'match kind:\n    case "phi3": pass',
        'found = re.match("qwen.*", architecture)',
        'if kind == "deepseek_v3_next": pass',
    ],
)
def test_a_planted_line_is_found(line: str) -> None:
    assert violations(line)


@pytest.mark.parametrize(
    "line", ['"""Like llama."""', 'raise ValueError("a llama")', 'if kind == "linear": pass']
)
def test_what_decides_nothing_is_not(line: str) -> None:
    assert not violations(line)
