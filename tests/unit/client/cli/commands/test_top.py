"""`pagekv top`: what it asks, and how it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest
from support.clients.scripted_server import ScriptedServer
from support.clients.stack import environment
from support.clients.top_answers import INFO, LISTED, STATS

from pagekv.client.cli.failures import EXIT_STATUS
from pagekv.client.cli.main import main


def answers(server: ScriptedServer) -> None:
    server.expect("GetModelInfo", INFO)
    server.expect("GetStats", STATS)
    server.expect("ListRequests", LISTED)


def test_without_a_terminal_it_is_one_frame(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    answers(server)
    assert main(["top", "--target", server.target]) == 0
    out = capsys.readouterr().out
    assert "request-0" in out
    assert "\x1b" not in out


def test_ctrl_c_is_the_way_to_end_it(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(server)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    assert main(["top", "--target", server.target]) == 0
    out = capsys.readouterr().out
    # The screen that was there before is back, and the cursor.
    assert out.index("\x1b[?1049h") < out.index("request-0") < out.index("\x1b[?1049l")
    assert "\x1b[?25h" in out


@pytest.mark.parametrize(
    ("command", "status"),
    [("top", 0), ("stats --watch", 0), ("top --json", 130), ("stats --watch --json", 130)],
)
def test_ctrl_c_is_no_failure_except_for_scripts(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, command: str, status: int
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for wait in ("commands.top.pause", "commands.stats.pause", "top_view.watch"):
        monkeypatch.setattr(f"pagekv.client.cli.{wait}", interrupt)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    if status:
        server.expect("GetStats", STATS)
        if command == "top --json":
            server.expect("ListRequests", LISTED)
    assert main([*command.split(), "--target", server.target]) == status
    words = " ".join(EXIT_STATUS.split())
    assert "pagekv top or pagekv stats --watch without --json; 1 failed" in words


@pytest.mark.parametrize("way_out", ["q", "ctrl-c", "terminated", "no stdin"])
def test_however_it_ends_the_terminal_is_as_it_was(server: ScriptedServer, way_out: str) -> None:
    answers(server)
    keyboard, screen = pty.openpty()
    try:
        before = termios.tcgetattr(screen)
        env = environment() | {"TERM": "xterm-256color"}
        command = [sys.executable, "-m", "pagekv.client.cli", "top", "--every", "60", "--target", server.target]
        stdin = subprocess.DEVNULL if way_out == "no stdin" else screen
        with subprocess.Popen(command, stdin=stdin, stdout=screen, stderr=screen, env=env) as popen:
            shown = b""
            while b"Ctrl-C ends this" not in shown:
                shown += os.read(keyboard, 65536)
            assert (b"q or Ctrl-C ends this" in shown) == (way_out != "no stdin")
            assert (termios.tcgetattr(screen) == before) == (way_out == "no stdin")
            if way_out == "q":
                os.write(keyboard, b"xq")
            else:
                popen.send_signal(signal.SIGINT if way_out == "ctrl-c" else signal.SIGTERM)
            assert popen.wait(120) == 0
        assert termios.tcgetattr(screen) == before
        while b"\x1b[?1049l" not in shown:
            shown += os.read(keyboard, 65536)
    finally:
        os.close(keyboard)
        os.close(screen)


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--target", "127.0.0.1:1", "--timeout", "60"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot reach PageKV at 127.0.0.1:1" in captured.err


def test_without_rich_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top"]) == 2
    assert "pip install 'pagekv[top]'" in capsys.readouterr().err
