"""Streamed text equals decoding the whole, for tokenizers that make it hard; stop texts are met wherever they
lie."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.detokenizer import Detokenizer, StopMatcher
from runtime.tokenizer import Tokenizer as OctavoTokenizer

TEXT = ["the cat sat on the mat, the dog did not", "καλημέρα κόσμε", "naïve 😀 👩‍👩‍👧 日本語", "  a  b\n\n c"]


def byte_level() -> str:
    """A byte-level BPE: tokens may hold parts of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


def byte_fallback() -> str:
    """As sentencepiece models are written: spaces as a mark, a first space that is dropped, <0xNN> for the
    rest."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁the", "t", "h", "e", "c", "a", "▁cat", "▁▁", ",", "é"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return tokenizer.to_str()


def metaspace() -> str:
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(["▁a", "b", "▁", "c▁", "<s>"])}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer.to_str()


TOKENIZERS = {make.__name__: OctavoTokenizer(make()) for make in (byte_level, byte_fallback, metaspace)}
SIZES = {"byte_level": 330, "byte_fallback": 270, "metaspace": 5}


def streamed(tokenizer, ids) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_deltas_join_to_the_whole(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, SIZES[name] - 1), max_size=24))
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert not any(d.endswith("\N{REPLACEMENT CHARACTER}") for d in deltas[:-1]), "half a character came out"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", ["the cat 😀, 日本語 é the", "👩‍👩‍👧", "   the  the"])
def test_text_survives(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    if name == "byte_fallback":  # no normaliser here: write its bytes
        ids = [14 + b for b in text.encode()]
    deltas = streamed(tokenizer, ids)
    assert "".join(deltas) == (text if name == "byte_level" else text.removeprefix(" "))
    assert all("\N{REPLACEMENT CHARACTER}" not in d for d in deltas)


def test_text_comes_as_early_as_it_is_certain():
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the cat sat 😀")
    deltas = streamed(tokenizer, ids)
    emoji = next(i for i, d in enumerate(deltas) if "😀" in d)
    assert all(deltas[: emoji - 3]) and emoji == len(ids) - 1


def test_special_tokens_have_no_text():
    tokenizer = TOKENIZERS["byte_fallback"]
    assert streamed(tokenizer, [1, 4, 2, 4, 1]) == ["", "the", "", " the", "", ""]


def run(stops, pieces):
    matcher, out = StopMatcher(stops), []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, matcher.flush()], False


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["a S", "TO", "P b"], (["a ", "", ""], True)),
        (["STOP"], ["a S", "TO", "T b"], (["a ", "", "STOT b", ""], False)),
        (["aab"], ["aa", "ab", "x"], (["", "a"], True)),
        (["\n\n", "END"], ["x\n", "EN", "D"], (["x", "\n", ""], True)),
        (["b", "abc"], ["ab", "c"], (["a"], True)),
        (["abc", "b"], ["xabc"], (["xa"], True)),
        (["bc", "abc"], ["xabc"], (["x"], True)),
        (["yes"], ["ye"], (["", "ye"], False)),
        ([], ["any", "thing"], (["any", "thing", ""], False)),
    ],
)
def test_stops(stops, pieces, expected):
    assert run(stops, pieces) == expected


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_a_stop_ends_the_text_where_it_first_completes(text, stops, cuts):
    """However the text is cut; of stop texts that complete together, the longest counts."""
    edges = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    out, stopped = run(stops, [text[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    met = [(end, end - len(s)) for end in range(len(text) + 1) for s in stops if text[:end].endswith(s)]
    assert stopped == bool(met)
    assert "".join(out) == (text[: min(met)[1]] if met else text)


def test_detokenizer_decodes_short_windows():
    """The work per token does not grow with the text."""
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return "".join(chr(97 + i) for i in ids)

    detokenizer = Detokenizer(decode)
    for i in range(200):
        assert detokenizer.push(i % 26)
    assert max(seen) <= 2
