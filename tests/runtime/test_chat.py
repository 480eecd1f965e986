"""Chat templates: rendered as transformers renders them, in a sandbox, with one BOS at most."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from runtime import ArtifactError, RequestError, Sampling, generate
from runtime.chat import ChatTemplate
from runtime.tokenizer import Tokenizer as OctavoTokenizer
from tests.runtime.fake import VOCAB, fake_engine, reference

TURNS = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": 'Say "é"'}]
CHATML = """\
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ raise_exception('system first') }}{% endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def test_render():
    text = ChatTemplate(CHATML, {}).render(TURNS)
    system, user = "<|im_start|>system\nBe <brief>.<|im_end|>\n", '<|im_start|>user\nSay "é"<|im_end|>\n'
    assert text == system + user + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Be <brief>."),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Say \\"é\\""}'),
        ("{{ {'b': 1, 'a': '<'} | tojson(indent=1) }}", '{\n "b": 1,\n "a": "<"\n}'),
        ("{% generation %}x{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}", "x"),
        ("{{ strftime_now('%Y') | length }}{{ tools is none }}{{ eos_token is defined }}", "4TrueFalse"),
        ("{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = 2 %}{% endfor %}{{ s.n }}", "2"),
    ],
)
def test_helpers(source, text):
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TURNS) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ self.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "{{ 'a' * 10**18 }}",
        "{{ messages.x.y }}",
    ],
)
def test_templates_are_confined(source):
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, {}).render(TURNS)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "user", "content": "x"}], "system first"),
        ([{"content": "x"}], "message 0"),
        ([TURNS[0], "x"], "message 1"),
        ([{"role": 1, "content": "x"}], "message 0"),
    ],
)
def test_refusals(messages, said):
    with pytest.raises(RequestError, match=said):
        ChatTemplate(CHATML, {}).render(messages)


WORDS = ["<s>", "</s>", "[", "]", "a", "b", "c", " ", *(f"w{i}" for i in range(VOCAB - 8))]


def words(template: str | None = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"):
    library = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="</s>"))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Fuse()
    library.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if template is not None:
        named = {"tool_use": "no", "default": template}
        config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return OctavoTokenizer(library.to_str(), config, bos_token_id=0)


def test_bos_is_never_doubled():
    tokenizer = words()
    assert tokenizer.encode("ab") == [0, 4, 5] == tokenizer.encode("<s>ab")
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [0, 2, 4, 3]
    assert tokenizer.decode([0, 4, 1]) == "a"


def test_two_bos_of_the_text_itself_stay():
    tokenizer = words()
    assert tokenizer.encode("<s><s>a", add_special_tokens=False) == [0, 0, 4]
    with fake_engine(tokenizer=tokenizer) as engine:
        fork = engine.submit("a", Sampling(max_new_tokens=0)).fork(append="<s><s>b")
        assert fork.result().prompt_token_ids == [0, 4, 0, 0, 5]


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(RequestError, match="not valid Unicode"):
        words().encode("a\ud800")


def test_a_model_without_a_template_says_so():
    with pytest.raises(RequestError, match="no chat template"):
        words(None).encode_chat(TURNS)


def test_prompts_of_all_kinds_in_one_call():
    """Text, token ids and messages; text comes back without specials, and stop texts end it."""
    chat = [{"role": "user", "content": "a"}]
    with fake_engine(tokenizer=words(), eos=(1,)) as engine:
        whole = generate(engine, ["a", [0, 4], chat], max_new_tokens=12)
        assert whole[0].prompt_token_ids == [0, 4] and whole[0].token_ids == whole[1].token_ids
        assert whole[2].prompt_token_ids == [0, 2, 4, 3] == generate(engine, chat)[0].prompt_token_ids
        tokens = whole[0].token_ids
        assert tokens[0] == int(reference([0, 4], [None]).argmax())
        text = "".join(WORDS[t] for t in tokens if t > 1)
        assert whole[0].text == text
        events = list(generate(engine, "a", max_new_tokens=12, stream=True))
        assert "".join(e.text for e in events) == text
        stop = WORDS[tokens[3]][-1] + WORDS[tokens[4]][:2]  # across a token boundary
        (stopped,) = generate(engine, "a", Sampling(max_new_tokens=12, stop=stop))
        assert stopped.text == text[: text.index(stop)] and stopped.finish_reason == "stop"
        events = list(generate(engine, "a", max_new_tokens=12, stop=stop, stream=True))
        assert "".join(e.text for e in events) == stopped.text and events[-1].finish_reason == "stop"


def test_sampling_and_keywords_together_are_refused():
    with fake_engine() as engine, pytest.raises(RequestError, match="both given"):
        generate(engine, [1], Sampling(), max_new_tokens=3)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b"{", "tokenizer.json: cannot be read"),
        ("tokenizer.json", b"\xff", "tokenizer.json: is not UTF-8"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json: not valid JSON"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: is not UTF-8"),
    ],
)
def test_damaged_files_are_named(name, content, said):
    files = {"tokenizer.json": words()._library.to_str().encode(), name: content}
    with pytest.raises(ArtifactError, match=said):
        OctavoTokenizer.read(files, None)
    assert OctavoTokenizer.read({}, None) is None
