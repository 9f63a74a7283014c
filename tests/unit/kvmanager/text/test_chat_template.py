"""Chat templates in their process: what they render, and bounds on time, memory and output."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pagekv.kvmanager.text import chat_template
from pagekv.kvmanager.text.chat_template import ChatTemplate
from pagekv.kvmanager.text.template_sandbox import ChatTemplateError
from pagekv.kvmanager.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "  Hello <b> "}]
TWO_RANGES = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def rendered(source: str, messages: Sequence[dict[str, str]] = HELLO) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    try:
        return asyncio.run(template.render(messages))
    finally:
        template.close()


def test_conversations_are_rendered_with_the_models_special_tokens() -> None:
    source = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    several = [{"role": "user", "content": "Grüße 😀"}, {"role": "", "content": ""}, {"role": "a\n", "content": "x"}]
    assert rendered(source, several) == "<s><user>Grüße 😀<><a\n>x"
    assert rendered(source, []) == "<s>"


@pytest.mark.parametrize("source", ["fine\n{% if %}", "fine\n{{ | }}"])
def test_a_source_that_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="broken in line 2"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses it: roles must alternate"),
        (TWO_RANGES, r"fails on it: it takes more than 0\.5 s of a processor"),
        ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", "takes more than"),
        ("{{ 'x' * 10**10 }}", "more memory than it may have"),
        ("{% set x = 'x' * 10**10 %}{{ messages[0].content }}", "more memory than it may have"),
        ("{{ messages[0].content * 10**9 }}", "more memory than it may have"),
        ("{{ messages[0].content * 2 * 10**6 }}", "24000000 bytes of it, must be at most 16777216"),
        ("{{ '%099999999999d' % 1 }}", "fails on it|memory"),
        ("{{ (messages | nonsense) }}", "broken in line 1: No filter named"),
    ],
)
def test_time_memory_and_output_are_bounded(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.5)
    with pytest.raises(ChatTemplateError, match=words):
        rendered(source)


def test_a_template_that_hung_renders_the_next_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_CPU_S", 0.5)
    template = ChatTemplate("{% if messages[0].content == 'hang' %}" + TWO_RANGES + "{% endif %}fine", {})

    async def main() -> None:
        turns = 0
        await template.warm()
        hangs = asyncio.create_task(template.render([{"role": "user", "content": "hang"}]))
        while not hangs.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns > 2  # the event loop was free meanwhile
        with pytest.raises(ChatTemplateError, match="processor"):
            await hangs
        assert await template.render(HELLO) == "fine"

    asyncio.run(main())
    template.close()


@pytest.mark.parametrize(
    ("source", "words", "lives"),
    [
        ("{% for a in x %}" * 21 + "{% endfor %}" * 21, "broken: too many statically nested blocks", False),
        ("{{ messages | xmlattr }}", "fails on it: 'list' object has no attribute 'items'", True),
    ],
)
def test_an_error_of_any_class_is_told_once_and_costs_no_process(source: str, words: str, lives: bool) -> None:
    template = ChatTemplate(source, {})

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ChatTemplateError, match=words):
                await template.render(HELLO)
        assert bool(template._worker._processes) == lives
        assert (template._worker._broken is None) == lives

    asyncio.run(main())
    template.close()


def test_the_demo_model_has_a_template() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[4] / "client/pagekv/client/demo_model")
    template = tokenizer.chat_template
    assert template is not None
    text = asyncio.run(template.render([{"role": "user", "content": "Who was Moses?"}]))
    assert "Who was Moses?" in text
    ids = tokenizer.encode(text, special_tokens=False, limit=99)
    assert "Who was Moses?" in tokenizer.decode(ids)
    assert set(ids) & tokenizer.special_ids
    with pytest.raises(ChatTemplateError, match="unknown role: pirate"):
        asyncio.run(template.render([{"role": "pirate", "content": "Arr"}]))
    tokenizer.close()
