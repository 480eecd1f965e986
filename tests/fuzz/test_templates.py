"""A checkpoint's chat template can neither hang nor fill memory, and reaches nothing of Python."""

from __future__ import annotations

import resource
import time

import pytest

from runtime import sandbox
from runtime.chat import ChatTemplate
from runtime.errors import RequestError

MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
DOUBLED = (
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = FORM %}{% endfor %}{{ ns.x }}"
)

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a macro's loops": "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}"
    "{{ m(12) }}",
    "a range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "a product": "{{ 'a' * 10 ** 10 }}",
    "a list's product": "{{ ([1] * 10 ** 10)|length }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "sums": DOUBLED.replace("FORM", "ns.x + ns.x"),
    "joined": DOUBLED.replace("FORM", "ns.x ~ ns.x"),
    "lists": DOUBLED.replace("FORM", "[ns.x, ns.x]") + "{{ ns.x }}",
    "dicts": DOUBLED.replace("FORM", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
    "replaced": DOUBLED.replace("FORM", "ns.x.replace('a', ns.x)"),
    "replaced by a filter": DOUBLED.replace("FORM", "ns.x|replace('a', ns.x)"),
    "formatted": "{{ '%1000000000d' % 1 }}",
    "formatted by a method": "{{ '{:1000000000}'.format(1) }}",
    "formatted by a filter": "{{ '%1000000000d'|format(1) }}",
    "centered": "{{ 'a'|center(10 ** 10) }}",
    "justified": "{{ 'a'.ljust(10 ** 10) }}",
    "indented": "{{ 'a\n'|indent(10 ** 10) }}",
    "as JSON": "{{ [1, [2]]|tojson(indent=10 ** 10) }}",
    "a block that doubles": "{% set a = 'ab' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a function's globals": "{{ raise_exception.__globals__.x }}",
    "a format's attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "another file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "changed messages": "{{ messages.append(1) }}",
    "brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nesting": "{% if true %}" * 1000 + "x" + "{% endif %}" * 1000,
    "a long one": "x" * (2 << 20),
    "a message of commands": "{{ raise_exception('\x1b[31m' ~ 'x' * 100000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_hostile_template_is_refused_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sixteenth of the budget, and in a sixteenth of the time."""
    for limit in ("MAX_STEPS", "MAX_SIZE", "MAX_ELEMENTS"):
        monkeypatch.setattr(sandbox, limit, getattr(sandbox, limit) // 16)
    before, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RequestError) as caught:
        ChatTemplate(HOSTILE[name], {}).render(MESSAGES)
    assert time.process_time() - before < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 500 << 10
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_what_templates_do_is_within_the_budget() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}{{ bos_token }}{%- for m in messages[1:] + messages -%}"
        "{%- set ns.n = ns.n + 1 -%}{%- if loop.first -%}F{{ loop.length }}{%- endif -%}"
        "<{{ m['role'] ~ ':' ~ ns.n }}>{{ m.content | trim }}{%- if not loop.last %}, {% endif -%}"
        "{%- endfor -%}{{ ['a', ns.n] | join('-') }}{{ {'k': [ns.n]} | tojson }}{{ '%s!' % 'x' }}"
        "{{ 'ab'.replace('a', 'c') }}"
        "{%- for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor -%}"
    )
    found = ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES)
    assert found == '<s>F3<assistant:1>Hi, <user:2>Hello, <assistant:3>Hia-3{"k": [3]}x!cbx1'


def test_a_long_conversation_is_within_it_too() -> None:
    messages = [{"role": "user", "content": "word " * 2000} for _ in range(1000)]
    source = "{% for m in messages %}[{{ m.role }}] {{ m.content|trim ~ '\n' }}{% endfor %}"
    assert len(ChatTemplate(source, {}).render(messages)) > 9_000_000


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}x", {})
    assert {template.render(MESSAGES) for _ in range(12)} == {"x"}
