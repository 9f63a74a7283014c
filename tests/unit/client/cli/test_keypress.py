"""Single keys from a terminal, and its state before and after."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import termios
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from pagekv.client.cli.keypress import Keys, pause


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


@pytest.mark.parametrize("stdin_is", ["no terminal", "a terminal that is gone"])
def test_no_wait_is_so_long_that_a_signal_before_it_seems_lost(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, stdin_is: str
) -> None:
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    if stdin_is == "no terminal":
        monkeypatch.setattr(sys, "stdin", io.StringIO("q"))
    else:
        request.getfixturevalue("keyboard")
        monkeypatch.setattr(os, "read", lambda *_: b"")
        monkeypatch.setattr(select, "poll", lambda: Mock(poll=lambda _: [(0, select.POLLIN)]))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    with Keys() as keys:
        assert not keys.wait_for(b"q", 60)
    assert now == 60
    assert max(slept) <= 0.5


def test_a_pause_has_no_piece_longer_than_a_signal_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    pause(1.7)
    assert sum(slept) == pytest.approx(1.7)
    assert max(slept) <= 0.5
