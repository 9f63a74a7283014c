"""Single keys from a terminal, and its state before and after."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios
from collections.abc import Iterator

import pytest

from pagekv.client.cli.keypress import Keys


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other side of a terminal that is the standard input."""
    keyboard, screen = pty.openpty()
    with os.fdopen(screen) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield keyboard
        os.close(keyboard)


def test_keys_come_as_they_are_pressed_and_the_terminal_is_given_back(keyboard: int) -> None:
    before = termios.tcgetattr(sys.stdin.fileno())
    with Keys() as keys:
        assert keys.are_read
        assert termios.tcgetattr(sys.stdin.fileno()) != before
        os.write(keyboard, b"xq")
        assert keys.wait_for(b"qQ", 60)
        os.write(keyboard, b"x")
        assert not keys.wait_for(b"qQ", 0.05)
    assert termios.tcgetattr(sys.stdin.fileno()) == before


def test_without_a_terminal_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("q"))
    with Keys() as keys:
        assert not keys.are_read
        assert not keys.wait_for(b"q", 0)
