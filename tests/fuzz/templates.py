"""Chat templates, made of pieces that loop, grow, nest and look behind values; and tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from runtime.errors import ArtifactError, RequestError
from runtime.tokenizer import Tokenizer
from tests.fuzz import mutate
from tests.fuzz.fuzzer import Fuzzer

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
VALUES = (
    *(
        "messages",
        "m.content",
        "ns.x",
        "bos_token",
        "1",
        "0",
        "-1",
        "99999",
        "10 ** 9",
        "'ab'",
        "''",
        "none",
        "[1, 2]",
    ),
    *(
        "{'a': ns.x}",
        "range(99999)",
        "range(3)",
        "loop",
        "self",
        "namespace",
        "ns",
        "cycler",
        "joiner()",
        "dict()",
    ),
    *("raise_exception", "strftime_now('%Y')", "messages[0]", "undefined", "true", "1.5", "nan", "'%99999d'"),
)
FILTERS = (
    *(
        "length",
        "trim",
        "upper",
        "list",
        "tojson",
        "string",
        "join('-')",
        "replace('a', ns.x)",
        "indent(99999)",
    ),
    *(
        "center(99999)",
        "batch(2)",
        "sort",
        "unique",
        "map('upper')",
        "select",
        "first",
        "last",
        "reverse",
        "int",
    ),
    *(
        "format(1)",
        "default('x')",
        "dictsort",
        "groupby('role')",
        "sum",
        "wordwrap(1)",
        "attr('__class__')",
        "xmlattr",
    ),
    *(
        "pprint",
        "random",
        "slice(3)",
        "truncate(3)",
        "urlize",
        "filesizeformat",
        "items",
        "escape",
        "abs",
        "round(99)",
    ),
)
METHODS = (
    *(
        "upper()",
        "replace('a', ns.x)",
        "join(messages)",
        "split()",
        "format(ns.x)",
        "items()",
        "append(1)",
        "pop()",
    ),
    *(
        "ljust(99999)",
        "__class__",
        "__init__",
        "mro()",
        "encode()",
        "format_map(m)",
        "startswith('a')",
        "strip()",
    ),
)


def expression(rng: Random, depth: int = 0) -> str:
    choice = rng.randrange(9) if depth < 4 else 0
    inner = expression(rng, depth + 1) if choice else rng.choice(VALUES)
    if choice in (1, 2):
        return f"({inner})|{rng.choice(FILTERS)}"
    if choice in (3, 4):
        return f"({inner}).{rng.choice(METHODS)}"
    if choice in (5, 6):
        operator = rng.choice(("+", "*", "~", "-", "//", "%", "**", "==", "in", "and", "<"))
        return f"({inner}) {operator} ({expression(rng, depth + 1)})"
    if choice == 7:
        return f"[{inner}, {inner}]"
    return f"({inner})[{rng.choice(VALUES)}]" if choice else inner


def statements(rng: Random, depth: int = 0) -> str:
    return "".join(_statement(rng, depth) for _ in range(rng.randrange(1, 4)))


def _statement(rng: Random, depth: int) -> str:
    value, body = expression(rng), statements(rng, depth + 1) if depth < 4 else "x"
    return rng.choice(
        (
            f"{{{{ {value} }}}}",
            f"{{% set ns.x = {value} %}}",
            f"{{% for m in {value} %}}{body}{{% endfor %}}",
            f"{{% for m in messages %}}{body}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% endif %}}",
            f"{{% set a %}}{body}{{% endset %}}{{{{ a }}}}",
            f"{{% macro f(m) %}}{body}{{% endmacro %}}{{{{ f({value}) }}}}",
            f"{{% for i in range(60) %}}{{% set ns.x = {value} %}}{{% endfor %}}",
            f"{{% filter {rng.choice(FILTERS)} %}}{body}{{% endfilter %}}",
            f"{{% include {value} %}}",
            "{% generation %}x{% endgeneration %}",
            rng.choice(mutate.TEXTS),
        )
    )


def make_template(rng: Random, folder: Path) -> None:
    text = "{% set ns = namespace(x='ab') %}" + statements(rng)
    (folder / "t.jinja").write_text(
        mutate.text(rng, text) if rng.random() < 0.1 else text, "utf-8", "replace"
    )


def render(folder: Path) -> str:
    from runtime.chat import ChatTemplate

    found = ChatTemplate((folder / "t.jinja").read_text("utf-8"), {"bos_token": "<s>"}).render(MESSAGES)
    assert isinstance(found, str)
    return "rendered"


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": "<s>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}]},
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "H": 4},
        "merges": [["a", "b"]],
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
    },
}
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}"}


def make_tokenizer(rng: Random, folder: Path) -> None:
    tokenizer = mutate.mutated(rng, TOKENIZER) if rng.random() < 0.7 else TOKENIZER
    config = mutate.mutated(rng, CONFIG) if rng.random() < 0.5 else CONFIG
    (folder / "tokenizer.json").write_bytes(mutate.raw_json(rng, tokenizer))
    (folder / "tokenizer_config.json").write_bytes(mutate.raw_json(rng, config))


def tokenize(folder: Path) -> str:
    """A text is encoded and decoded, whatever the files make of it."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokenizer = Tokenizer.read(files, 0)
    assert tokenizer is not None
    ids = tokenizer.encode("Hab ab\n é")
    assert all(type(i) is int for i in ids) and isinstance(tokenizer.decode(ids), str)
    json.dumps(ids)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat(MESSAGES)
    return "read"


FUZZERS = (
    Fuzzer(
        "template", make_template, render, ("runtime/chat.py", "runtime/sandbox.py"), (RequestError,), True
    ),
    Fuzzer(
        "tokenizer", make_tokenizer, tokenize, ("runtime/tokenizer.py",), (ArtifactError, RequestError), True
    ),
)
