"""Styles, tables and times."""

from __future__ import annotations

import io
import os
import shutil
import sys

import pytest
from support.terminal import TerminalStream

from pagekv.client.cli.terminal import Terminal, counted, milliseconds, pagekv_command, table


def on(monkeypatch: pytest.MonkeyPatch, out: io.StringIO, err: io.StringIO, **env: str) -> Terminal:
    """A terminal that writes to these streams, with these variables of those that it reads."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return Terminal()


def test_styles_only_on_a_terminal_that_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, env, styled in (
        (TerminalStream, {}, True),
        (TerminalStream, {"NO_COLOR": "1"}, False),
        (io.StringIO, {}, False),
    ):
        out, err = make(), make()
        terminal = on(monkeypatch, out, err, **env)
        terminal.note("note")
        terminal.print(terminal.bold("loud"))
        terminal.progress(1, 2, "half")
        terminal.error("wrong")
        shown = out.getvalue() + err.getvalue()
        assert ("\x1b" in shown) is styled
        assert ("[██████████████··············] 1/2 half" in shown) is styled
        # The bar is wiped off before anything else is written.
        assert err.getvalue().endswith("\r\x1b[Kwrong\n" if styled else "note\nwrong\n")


def test_an_error_and_the_end_have_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = on(monkeypatch, out, err)
    terminal.error("at once")
    terminal.end_line()
    assert out.getvalue() == ""
    terminal.write("half a")
    terminal.write("")
    terminal.error("wrong")
    terminal.end_line()
    assert out.getvalue() == "half a\n"
    terminal.write("half")
    terminal.end_line()
    terminal.end_line()
    assert out.getvalue() == "half a\nhalf\n"


def test_an_aside_adds_nothing_to_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, before in ((TerminalStream, "\n"), (io.StringIO, "")):
        out, err = make(), make()
        terminal = on(monkeypatch, out, err, NO_COLOR="1")
        terminal.write("half a")
        terminal.aside("wait")
        terminal.write(" line")
        assert (out.getvalue(), err.getvalue()) == ("half a line", f"{before}wait\n")


def test_a_last_note_may_find_closed_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the streams that would fail at exit."""
    pipes = [os.pipe(), os.pipe()]
    for read, _ in pipes:
        os.close(read)
    (_, out_end), (_, err_end) = pipes
    with open(out_end, "w") as out, open(err_end, "w") as err:
        out.write("half a line")
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        Terminal().last_note("stopped")
    # Leaving `with` flushes them, as the end of a process does.


def test_tables_and_times() -> None:
    assert table([("a", 10), ("bcd", 2)], ("name", "n"), indent=" ") == " name   n\n a     10\n bcd    2"
    assert table([]) == ""
    rows = [("a", "one two three four five six"), ("b", "seven")]
    assert table(rows, width=24) == "a  one two three four\n   five six\nb  seven"
    assert table(rows, width=10) == table(rows)
    assert [milliseconds(s) for s in (None, 0.0001234, 0.00123, 0.123, 12.3)] == [
        "-", "0.12 ms", "1.2 ms", "123 ms", "12300 ms",
    ]  # fmt: skip  # several entries a line: one each would fill a screen
    assert [counted(number, "pin") for number in range(3)] == ["0 pins", "1 pin", "2 pins"]


def test_nothing_in_a_table_or_a_message_controls_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a\x1b[2J\nb\u202ec\udc80", 1), ("größe 漢 '", 2)]
    # As wide as it is shown.
    assert table(rows, ("namespace", "n")) == (
        "namespace                 n\na\\x1b[2J\\nb\\u202ec\\udc80  1\ngröße 漢 '                 2"
    )
    out, err = TerminalStream(), TerminalStream()
    terminal = on(monkeypatch, out, err)
    for write in (terminal.note, terminal.error, terminal.aside):
        write("one\x1b[2J\ntwo\r")
    shown = err.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert shown == "one\\x1b[2J\ntwo\\r\n" * 3


@pytest.mark.parametrize(
    ("argv", "found", "name"),
    [
        (".venv/bin/pagekv", None, ".venv/bin/pagekv"),
        (".venv/bin/pagekv", "/usr/bin/pagekv", "pagekv"),
        ("cli/__main__.py", None, "pagekv"),
    ],
)
def test_the_command_is_named_as_it_can_be_typed(
    argv: str, found: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [argv])
    monkeypatch.setattr(shutil, "which", lambda command: found)
    assert pagekv_command() == name
