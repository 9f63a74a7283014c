"""Chat templates: conveniences, refusals, and the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagekv.kvmanager.text.chat_template import ChatTemplate, ChatTemplateError
from pagekv.kvmanager.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "  Hello <b> "}]


def test_templates_get_the_conveniences_they_expect() -> None:
    source = """
{% for message in messages %}
    {% if message.role == "system" %}
        {% continue %}
    {% endif %}
<{{ message['role'] }}>{{ message['content'] | trim }} {{ {"é": "<"} | tojson }}
{% generation %}said{% endgeneration %}
{% endfor %}
{{ tools is none }} {{ strftime_now("%Y") | length }}{% if add_generation_prompt %}<assistant>{% endif %}
"""
    got = ChatTemplate(source, {}).render([{"role": "system", "content": "x"}, *HELLO])
    # The line break behind each block tag is trimmed.
    assert got == '\n<user>Hello <b> {"é": "<"}\nsaidTrue 4<assistant>'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "fails on it"),
        ("{{ messages[7]['role'] + 1 }}", "fails on it"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "what it must not|fails on it"),
        ("{{ messages.append('x') }}", "what it must not"),
    ],
)
def test_a_template_that_fails_says_why(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        ChatTemplate(source, {}).render(HELLO)


def test_the_demo_model_has_a_template() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[4] / "client/pagekv/client/demo_model")
    template = tokenizer.chat_template
    assert template is not None
    text = template.render([{"role": "user", "content": "Who was Moses?"}])
    assert "Who was Moses?" in text
    ids = tokenizer.encode(text, special_tokens=False, limit=99)
    assert "Who was Moses?" in tokenizer.decode(ids)
    assert set(ids) & tokenizer.special_ids
    with pytest.raises(ChatTemplateError, match="unknown role: pirate"):
        template.render([{"role": "pirate", "content": "Arr"}])
