"""A compiled chat template. It runs in a process of its own, which bounds its time and memory."""

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

from pagekv.kvmanager.text.library_errors import words_of


class ChatTemplateError(Exception):
    """The template cannot be used, or refused a conversation; the message is fit for a client."""


def check_syntax(source: str) -> None:
    """Raises ChatTemplateError for a source that is no template. Does not evaluate any of it, as compiling would."""
    try:
        _environment().parse(source)
    except TemplateSyntaxError as error:
        raise _broken(error) from error
    except RecursionError as error:
        raise ChatTemplateError("the chat template is broken: it is nested too deeply") from error
    except Exception as error:  # such as ValueError, for a number of thousands of digits
        raise ChatTemplateError(f"the chat template is broken: {_words(error)}") from error


class TemplateSandbox:
    """A compiled template. It comes with a model and is not trusted: it sees nothing but a conversation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: variables of a template such as bos_token. Raises ChatTemplateError."""
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise _broken(error) from error
        except Exception as error:  # such as SyntaxError, of Python for what jinja made of it
            raise ChatTemplateError(f"the chat template is broken: {_words(error)}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, messages of {"role", "content"}, up to the point where the assistant speaks.
        Raises ChatTemplateError.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except _Refused as error:
            raise ChatTemplateError(f"the model's chat template refuses it: {error}") from error
        except SecurityError as error:
            raise ChatTemplateError(f"the model's chat template does what it must not: {error}") from error
        except Exception as error:  # a template can call methods and filters with arguments of any type
            raise ChatTemplateError(f"the model's chat template fails on it: {_words(error)}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = time.strftime
    return environment


def _broken(error: TemplateSyntaxError) -> ChatTemplateError:
    return ChatTemplateError(f"the chat template is broken in line {error.lineno}: {error.message}")


def _words(error: Exception) -> str:
    return "it needs more memory than it may have" if isinstance(error, MemoryError) else words_of(error)


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
