"""A model's own chat template: conversation to prompt text, as Hugging Face templates expect to be rendered."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """The template cannot be used, or refused a conversation; the message is fit for a client."""


class ChatTemplate:
    """A compiled template. Rendering is sandboxed: templates come with models and are not trusted."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the variables a template may use: bos_token, eos_token and so on."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(f"the chat template is broken in line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation of {"role", "content"} as text up to where the assistant speaks. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _Refused as error:
            raise ChatTemplateError(f"the model's chat template refuses it: {error}") from error
        except SecurityError as error:
            raise ChatTemplateError(f"the model's chat template does what it must not: {error}") from error
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template fails on it: {error}") from error


class _Refused(TemplateError):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - the shape of the base class

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which is wrong in a prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
