"""`pagekv replay`: the process that it starts, with every argument handed on; the replay is tested with the manager."""

from __future__ import annotations

import sys

import pytest

from pagekv.client.cli.commands import replay
from pagekv.client.cli.main import main


@pytest.mark.parametrize(("ends", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_every_argument_is_handed_on_and_the_status_comes_back(
    ends: str, status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"import os, sys; print(sys.argv[1:], flush=True); {ends}"
    monkeypatch.setattr(replay, "COMMAND", (sys.executable, "-c", script))
    assert main(["replay", "trace.jsonl", "--blocks", "3", "--json"]) == status
    assert capfd.readouterr().out == "['trace.jsonl', '--blocks', '3', '--json']\n"


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "find_spec", lambda name: None if name == "msgpack" else name)
    assert main(["replay", "x"]) == 1
    assert capsys.readouterr().err == "pagekv: replay needs msgpack: pip install 'pagekv[manager]'\n"
