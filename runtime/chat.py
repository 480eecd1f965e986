"""Chat templates: messages to prompt text.

Templates come with checkpoints and are untrusted: they run in jinja2's immutable sandbox, and see the
messages and the special tokens alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import RequestError

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. special_tokens: what templates may use, such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        self._template: Any = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Raises RequestError if the messages are malformed or the template refuses them."""
        check_messages(messages)
        import jinja2  # here: importing the runtime stays light

        try:
            if self._template is None:
                self._template = _environment().from_string(self._source)
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.exceptions.SecurityError as error:
            raise RequestError(
                f"the chat template does something unsafe ({error})",
                where="chat messages",
                todo="Give the prompt as text",
            ) from error
        except Exception as error:  # it is code that came with the checkpoint: anything may go wrong in it
            raise RequestError(
                f"the chat template refuses them ({error})",
                where="chat messages",
                todo="Use the roles and fields that this model's template knows",
            ) from error


def check_messages(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise RequestError(
                f"message {i} is {str(message)[:60]!r}",
                where="chat messages",
                todo="Each is a dict with 'role' (a text) and 'content'",
            )


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now)
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
