"""Chat templates: messages to prompt text.

Templates come with checkpoints and are untrusted: they run in runtime.sandbox, and see the messages and the
special tokens alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.errors import RequestError, shorten, shown

Message = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. special_tokens: what templates may use, such as bos_token."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source, self._special_tokens = source, dict(special_tokens)
        self._template: Any = None
        self._one_at_a_time = threading.Lock()  # a rendering has a budget

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Raises RequestError if the messages are malformed or the template refuses them."""
        check_messages(messages)
        import jinja2  # here: importing the runtime stays light

        try:
            with self._one_at_a_time:
                return self._render([dict(m) for m in messages], add_generation_prompt)
        except jinja2.exceptions.SecurityError as error:
            raise RequestError(
                f"the chat template does something unsafe ({shorten(str(error), 200)})",
                where="chat messages",
                todo="Give the prompt as text",
            ) from error
        except Exception as error:  # it is code that came with the checkpoint: anything may go wrong in it
            raise RequestError(
                f"the chat template refuses them ({_said(error)})",
                where="chat messages",
                todo="Use the roles and fields that this model's template knows",
            ) from error

    def _render(self, messages: list[dict[str, Any]], answer: bool) -> str:
        from runtime.sandbox import Budget

        if self._template is None:
            self._environment = _environment()
            self._template = self._environment.from_string(self._source)
        self._environment.budget = Budget()
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=answer,
            **self._special_tokens,
        )


def _said(error: Exception) -> str:
    """Its message is the template's own text."""
    return shorten(" ".join(str(error).split()), 400) or type(error).__name__


def check_messages(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise RequestError(
                f"message {i} is {shown(message)}",
                where="chat messages",
                todo="Each is a dict with 'role' (a text) and 'content'",
            )


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols

    from runtime.sandbox import Environment

    class Generation(Extension):
        """`{% generation %}` marks assistant text for training; here its body is rendered as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    env = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.add_filter("tojson", _tojson)
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
