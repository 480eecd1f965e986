"""Text to token ids and back, from the artifact's own tokenizer files, through the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from runtime.artifact import Artifact
from runtime.chat import ChatTemplate, Message
from runtime.detokenizer import Detokenizer
from runtime.errors import ArtifactError, OctavoError, RequestError, shorten


class Tokenizer:
    """Encodes prompts and decodes outputs.

    tokenizer_json: the file's text. config: tokenizer_config.json. template: chat_template.jinja, if there is
    one. bos_token_id: never doubled at the start of a prompt.
    """

    def __init__(
        self,
        tokenizer_json: str,
        config: dict[str, Any] | None = None,
        template: str | None = None,
        bos_token_id: int | None = None,
    ) -> None:
        from tokenizers import Tokenizer as Library  # here: importing the runtime stays light

        config = config or {}
        with _calling_the_library("cannot be read", ArtifactError, "Compile again"):
            self._library = Library.from_str(tokenizer_json)
            self._library.no_truncation()
            self._library.no_padding()
            added = self._library.get_added_tokens_decoder()
        self._bos_token_id = bos_token_id
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._alone: dict[int, str] = {}  # texts of tokens that were decoded by themselves
        self._byte_tokens = _byte_tokens(self._library)
        source = template if template is not None else _template(config.get("chat_template"))
        self._chat = None if source is None else ChatTemplate(source, _special_tokens(config))

    @staticmethod
    def of(artifact: Artifact) -> Tokenizer | None:
        """The artifact's tokenizer; None if it was compiled without one."""
        names = artifact.manifest.tokenizer_files
        files = {name.rsplit("/", 1)[-1]: artifact.read(name) for name in names}
        return Tokenizer.read(files, artifact.manifest.model.bos_token_id)

    @staticmethod
    def read(files: Mapping[str, bytes], bos_token_id: int | None) -> Tokenizer | None:
        """From the contents of a checkpoint's files, by name; None without a tokenizer.json."""
        if "tokenizer.json" not in files:
            return None
        texts = {name: _text(name, content) for name, content in files.items()}
        config = _config(texts.get("tokenizer_config.json", "{}"))
        template = texts.get("chat_template.jinja")
        return Tokenizer(texts["tokenizer.json"], config, template, bos_token_id)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens, the added ones too."""
        return self._library.get_vocab(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A plain text, with the special tokens that the tokenizer adds to a prompt (a BOS, say)."""
        return self._ids(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        """Chat messages, up to where the assistant answers; or to their end, for more to follow.

        The template writes all special tokens itself.
        """
        if self._chat is None:
            raise RequestError(
                "this model has no chat template",
                where="chat messages",
                todo="Give the prompt as text or token ids",
            )
        return self._ids(self._chat.render(messages, add_generation_prompt=answer), add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        with _calling_the_library("cannot decode tokens", ArtifactError, "Compile again"):
            return self._library.decode(ids, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """For one output, token by token."""
        return Detokenizer(self.decode, self._byte_tokens, self._special, self._alone)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's ids, with one BOS where both the text and the tokenizer wrote it. (Where the text alone
        wrote two, they stay.)"""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            todo = "Remove lone surrogates"
            raise RequestError(f"not valid Unicode ({error})", where="prompt", todo=todo) from error
        ids = self._encoded(text, add_special_tokens)
        if len(ids) < 2 or not ids[0] == ids[1] == self._bos_token_id:
            return ids
        plain = self._encoded(text, False)
        return ids if len(plain) == len(ids) else ids[1:]

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        with _calling_the_library("cannot encode the prompt", RequestError, "Give the prompt as token ids"):
            return self._library.encode(text, add_special_tokens=add_special_tokens).ids


@contextmanager
def _calling_the_library(what: str, kind: type[OctavoError], todo: str) -> Iterator[None]:
    """The library raises plain Exception; where it panics, on an absurd file, not even that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = shorten(" ".join(str(error).split()), 300)
        raise kind(f"{what} ({said})", where="tokenizer.json", todo=todo) from error


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"is not UTF-8 ({error})", where=name, todo="Compile the model again") from error


def _config(text: str) -> dict[str, Any] | None:
    """tokenizer_config.json as its checkpoint had it, read as leniently as everyone does."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"not valid JSON ({shorten(str(error), 200)})",
            where="tokenizer_config.json",
            todo="Compile again",
        ) from error
    return config if isinstance(config, dict) else None


def _byte_tokens(library: Any) -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF>, where the decoder joins them to characters."""
    if "ByteFallback" not in repr(library.decoder):
        return frozenset()
    ids = (library.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(i for i in ids if i is not None)


def _template(value: Any) -> str | None:
    """chat_template of tokenizer_config.json: a text, or a list of named ones (`default` is for chat)."""
    if isinstance(value, list):
        value = next(
            (t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None
        )
    return value if isinstance(value, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    found = {
        name: config[name].get("content") if isinstance(config.get(name), dict) else config.get(name)
        for name in names
    }
    return {name: token for name, token in found.items() if isinstance(token, str)}
