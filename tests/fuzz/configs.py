"""config.json: of several architectures, with hostile values, up to where the model would be traced.

Tracing takes seconds whatever the values are, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from compiler.errors import CompileError
from tests.fuzz import mutate
from tests.fuzz.config_values import BASES, EXTRAS, ROPES, hostile
from tests.fuzz.fuzzer import Fuzzer

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
GENERATION = {"eos_token_id": [2, 3], "bos_token_id": 1}


def make_config(rng: Random, folder: Path) -> None:
    """A valid configuration with some fields changed; code beside it that must not run."""
    config = json.loads(json.dumps(rng.choice(BASES)))
    with suppress(RecursionError):
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            _change(rng, rng.choice([config, *(v for v in config.values() if isinstance(v, dict))]))
        if rng.random() < 0.1:
            config = mutate.mutated(rng, config)
    (folder / "config.json").write_bytes(mutate.raw_json(rng, config))
    for name in ("modeling.py", "configuration.py", "modeling_evil.py"):
        (folder / name).write_text(CODE)
    if rng.random() < 0.1:
        found = mutate.mutated(rng, GENERATION)
        (folder / "generation_config.json").write_bytes(mutate.raw_json(rng, found))
    if rng.random() < 0.03:
        mutate.replace_by_link(rng, folder / "config.json", folder.parent / "outside")


def _change(rng: Random, part: dict[str, Any]) -> None:
    choice = rng.randrange(10)
    if choice < 5 and part:
        key = rng.choice(list(part))
        part[key] = hostile(rng, key, part[key])
    elif choice < 7:
        key = rng.choice(list(EXTRAS))
        part[key] = rng.choice(EXTRAS[key])
    elif choice == 7:
        part[rng.choice(("rope_scaling", "rope_parameters"))] = mutate.mutated(rng, rng.choice(ROPES))
    elif choice == 8 and part:
        del part[rng.choice(list(part))]
    else:
        part[rng.choice(mutate.TEXTS)] = mutate.value(rng)


class Built(Exception):
    """The model was made."""


def load_config(folder: Path) -> str:
    """What `octavo compile --no-weights` and `octavo explain` read of it."""
    from compiler import importers
    from compiler.survey import survey

    survey(folder, weights=False)
    try:
        with _untraced():
            importers.load(folder, weights=False)
    except Built as built:
        return str(built)
    except CompileError as error:
        _check_causes(error)
        _explain(folder)
        raise
    raise AssertionError("it was traced")


def _explain(folder: Path) -> None:
    """What is said of a model that is refused, where config.json can be read."""
    import compiler
    from compiler.explanation import collect

    if collect._config(folder) and Random(str(folder.stat().st_ino)).random() < 0.2:
        try:
            with _untraced():
                text = str(compiler.explain(folder))
        except Built:  # what it is refused for is not in its graph
            return
        assert all(c.isprintable() or c == "\n" for c in text), text[:2000]


@contextmanager
def _untraced() -> Iterator[None]:
    from compiler.importers import huggingface

    trace = huggingface.export_graph
    huggingface.export_graph = _built
    try:
        yield
    finally:
        huggingface.export_graph = trace


def _built(model: Any, context: int, *others: Any) -> Any:
    assert type(context) is int and 0 < context <= 2**28
    arrays = [*model.parameters(), *model.buffers()]
    assert arrays and all(each.device.type == "meta" for each in arrays)
    raise Built(f"a model of {model.config.model_type}")


def _check_causes(error: BaseException) -> None:
    """PyTorch says otherwise than Python that memory ran out."""
    cause: BaseException | None = error
    while cause is not None:
        assert "can't allocate memory" not in str(cause), str(cause)[:300]
        cause = cause.__cause__ or cause.__context__


_READERS = ("huggingface", "configuration", "choose", "stored_names", "config_limits", "freeze")
FUZZERS = (
    Fuzzer(
        "config",
        make_config,
        load_config,
        ("compiler/survey.py", *(f"compiler/importers/{name}.py" for name in _READERS)),
        (CompileError,),
        evaluates=True,  # dataclasses make their methods of text
    ),
)
