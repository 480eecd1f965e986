"""Another artifact as the drafter: its tokens are compared with the target's, and its memory is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import runtime
from runtime.artifact import Artifact
from runtime.errors import ArtifactError, ResourceError
from runtime.speculation.beside import check_tokens
from tests.runtime import made

WORDS = {"<s>": 0, "a": 1, "b": 2, "c d": 3}


def tokenizer(words: dict[str, int], added: dict[str, int] | None = None) -> bytes:
    """A tokenizer.json of whole words."""
    special = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    whole = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **special} for token, i in (added or {}).items()],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<s>"},
    }
    return json.dumps(
        whole
        | dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
        | {"truncation": None, "padding": None}
    ).encode()


def artifact(folder: Path, text: bytes | None, **changes: object) -> Path:
    files = made.default_files()
    if text is None:
        return made.write(folder, files, made.manifest(files, **changes))
    files["tokenizer/tokenizer.json"] = text
    found = {"present": True, "files": ["tokenizer/tokenizer.json"]}
    return made.write(folder, files, made.manifest(files, tokenizer=found, **changes))


def check(drafter: Path, target: Path) -> None:
    opened = [Artifact.open(path) for path in (drafter, target)]
    check_tokens(opened[0], opened[1], "small.octavo")


@pytest.mark.parametrize("more", [{}, {"only the drafter has it": 4}])
def test_one_that_knows_all_tokens_is_taken(tmp_path: Path, more: dict[str, int]) -> None:
    target = artifact(tmp_path / "target", tokenizer(WORDS))
    check(artifact(tmp_path / "drafter", tokenizer(WORDS | more)), target)


@pytest.mark.parametrize(
    ("words", "added", "says"),
    [
        (
            WORDS | {"a": 2, "b": 1},
            {},
            "of 4 tokens 2 differ, such as 'a', 1 of the target's, which has it as 2",
        ),
        (
            {"<s>": 0, "a": 1, "b": 2},
            {},
            "of 4 tokens 1 differ, such as 'c d', 3 of the target's, which lacks it",
        ),
        (WORDS | {"e": 4}, {"<end>": 5}, None),
    ],
)
def test_one_with_other_tokens_is_refused(
    tmp_path: Path, words: dict[str, int], added: dict[str, int], says: str | None
) -> None:
    target = artifact(tmp_path / "target", tokenizer(WORDS, {"<end>": 4} if says is None else {}))
    other = artifact(tmp_path / "drafter", tokenizer(words, added))
    with pytest.raises(ResourceError) as caught:
        check(other, target)
    error = caught.value
    assert (says or "'<end>', 4 of the target's, which has it as 5") in error.what
    assert error.where == "draft = 'small.octavo'" and "same family" in (error.todo or "")


def test_without_tokenizers_the_sizes_must_be_equal(tmp_path: Path) -> None:
    target, same = artifact(tmp_path / "target", None), artifact(tmp_path / "same", None)
    check(same, target)
    model = made.manifest({})["model"] | {"vocab_size": 96}
    with pytest.raises(ResourceError, match="96 tokens, the target 97"):
        check(artifact(tmp_path / "other", None, model=model), target)
    for pair in ((None, WORDS), (WORDS, None)):
        texts = [None if words is None else tokenizer(words) for words in pair]
        one, other = (artifact(tmp_path / f"{i}{pair[0] is None}", text) for i, text in enumerate(texts))
        with pytest.raises(ResourceError, match="compiled without a tokenizer"):
            check(one, other)


def test_its_memory_is_planned_beside_the_targets(tmp_path: Path) -> None:
    """Blocks of the same model: as many. With a share of the memory to be filled, half of it for each."""
    target, drafter = artifact(tmp_path / "target", None), artifact(tmp_path / "drafter", None)
    alone, both = (runtime.plan(target, kv_blocks=20, draft=draft) for draft in (None, drafter))
    assert both.draft is not None and both.draft.blocks == (20,) == tuple(both.num_blocks)
    assert both.draft.kv_bytes == 20 * 2048 == both.kv_bytes
    assert both.draft.weight_bytes == alone.weight_bytes
    rows = 128  # for drafts, of logits of 97 numbers, and what the sampler has of each
    assert both.total_bytes > alone.total_bytes + both.draft.total + rows * 97 * 4
    plan = runtime.plan(target, kv_memory="40%", max_requests=2**20, draft=drafter)
    assert plan.draft is not None and plan.free_bytes is not None
    assert plan.draft.kv_bytes == pytest.approx(plan.kv_bytes, rel=0.01)
    assert plan.kv_bytes + plan.draft.kv_bytes < 0.41 * plan.free_bytes


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    target = artifact(tmp_path / "target", None)
    with pytest.raises(ResourceError, match="draft = 'nonesuch'"):
        runtime.plan(target, draft="nonesuch")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError):
        runtime.plan(target, draft=tmp_path / "empty")
