"""`pagekv replay`: the process that it starts, with every argument handed on; the replay is tested with the manager."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from support.clients.stack import environment

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


# The command with a replay that says that it runs, and computes for long. It prints its exit status.
COMPUTING = """
import signal, sys
from pagekv.client.cli.commands import replay
from pagekv.client.cli.main import main
# Also if the tests run under nohup, or in the background of a shell.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
script = "import time; print('computing', flush=True); time.sleep(100)"
replay.COMMAND = (sys.executable, "-c", script)
status = main(["replay", "x"])
assert {signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)} == {signal.SIG_DFL}
print(status)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_command_ends_the_process_that_computes(signum: signal.Signals) -> None:
    command = [sys.executable, "-c", COMPUTING]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        try:
            assert popen.stdout.readline() == "computing\n"
            popen.send_signal(signum)
            # Both have the pipe: it ends with the last of them.
            rest, _ = popen.communicate(timeout=60)
        finally:
            popen.kill()
    assert int(rest) == 128 + signum


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "find_spec", lambda name: None if name == "msgpack" else name)
    assert main(["replay", "x"]) == 1
    assert capsys.readouterr().err == "pagekv: replay needs msgpack: pip install 'pagekv[manager]'\n"
