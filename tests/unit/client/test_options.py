"""Options in `help`."""

from __future__ import annotations

import inspect
import pydoc
import sys
from typing import TypedDict

import pytest

from pagekv.client import AsyncPageKVClient, CallOptions, GenerateOptions, PageKVClient, WatchOptions
from pagekv.client.options import described, with_options_of


class Options(TypedDict, total=False):
    """Of a call."""

    size: int
    """Bytes of it, 1 to 9, in a text that is too long for one line of a docstring and goes on in the line below, as it
    must.
    """
    untold: int
    other: str
    """Anything."""


SHOWN = """Of a call.

size: Bytes of it, 1 to 9, in a text that is too long for one line of a docstring and goes on in the
    line below, as it must.
other: Anything."""


@pytest.mark.parametrize("client", [PageKVClient, AsyncPageKVClient])
def test_help_of_a_client_shows_every_option(client: type) -> None:
    shown = " ".join(pydoc.plain(pydoc.render_doc(client)).replace("|", " ").split())
    for options in (GenerateOptions, CallOptions, WatchOptions):
        _, *lines = (inspect.getdoc(options) or "").split("\n\n")[1].splitlines()
        assert len(lines) >= len(options.__annotations__) - 1
        for line in lines:
            assert " ".join(line.split()) in shown


def test_texts_stand_in_the_docstring_of_the_class_and_of_its_methods() -> None:
    options = described(type("Options", (), {"__doc__": Options.__doc__, "__module__": __name__}))
    assert options.__doc__ == SHOWN

    @with_options_of(options)
    def call() -> None:
        """Does it.

        At once.
        """

    assert call.__doc__ == f"Does it.\n\nAt once.\n\n{SHOWN}"


def test_without_sources_the_docstring_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "__file__", "/nowhere/module.py")
    assert described(type("Options", (), {"__doc__": "Short.", "__module__": __name__})).__doc__ == "Short."
