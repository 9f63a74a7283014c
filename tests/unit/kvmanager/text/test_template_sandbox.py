"""Rendering a chat template: conveniences, refusals, and the sandbox."""

from __future__ import annotations

import pytest

from pagekv.kvmanager.text.template_sandbox import ChatTemplateError, TemplateSandbox, check_syntax

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
    got = TemplateSandbox(source, {}).render([{"role": "system", "content": "x"}, *HELLO])
    # The line break behind each block tag is trimmed.
    assert got == '\n<user>Hello <b> {"é": "<"}\nsaidTrue 4<assistant>'


def test_objects_are_written_as_the_template_asks() -> None:
    source = '{{ {"b": "é", "a": 1} | tojson(ensure_ascii=true, indent=1, separators=(" ;", "= "), sort_keys=true) }}'
    assert TemplateSandbox(source, {}).render(HELLO) == '{\n "a"= 1 ;\n "b"= "\\u00e9"\n}'


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "fails on it"),
        ("{{ messages[7]['role'] + 1 }}", "fails on it"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "what it must not|fails on it"),
        ("{{ messages.append('x') }}", "what it must not"),
        ("{{ messages | xmlattr }}", "fails on it: 'list' object has no attribute 'items'"),
        ("{{ 'a' | dictsort }}", "fails on it: 'str' object has no attribute 'items'"),
        ("{{ cycler() }}", "fails on it: at least one item has to be provided"),
    ],
)
def test_a_template_that_fails_says_why(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        TemplateSandbox(source, {}).render(HELLO)


def test_looking_for_mistakes_evaluates_nothing() -> None:
    check_syntax("{{ 'x' * 10**10 }}{% for a in range(99999) %}{% endfor %}{% generation %}{% endgeneration %}")
    for source, words in (
        ("fine\n{% if %}", "broken in line 2"),
        ("{{" + "(" * 5000, "broken: it is nested too deeply"),
        ("{{" + "9" * 5000 + "}}", "broken: .*digits"),
    ):
        with pytest.raises(ChatTemplateError, match=words):
            check_syntax(source)


def test_a_filter_that_is_not_there_is_found_when_compiling() -> None:
    with pytest.raises(ChatTemplateError, match="broken in line 1: No filter named 'nonsense'"):
        TemplateSandbox("{{ messages | nonsense }}", {})


def test_what_python_cannot_compile_is_refused() -> None:
    source = "{% for a in x %}" * 21 + "{% endfor %}" * 21
    check_syntax(source)
    with pytest.raises(ChatTemplateError, match="broken: too many statically nested blocks"):
        TemplateSandbox(source, {})
