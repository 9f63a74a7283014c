"""Ctrl-C while a command imports its modules: no traceback, whatever is being imported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.clients.stack import environment

from pagekv.common.interrupts import quiet_interrupts, quiet_interrupts_to_the_end

# Stands for a module that the command imports: says so, and waits.
WAITS = "import signal\nprint('importing', flush=True)\nsignal.pause()\n"


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("pagekv.client.cli", "grpc"),
        ("pagekv.kvmanager", "grpc"),
        ("pagekv.executor", "grpc"),
        ("pagekv.conformance", "grpc"),
        ("pagekv.kvmanager.replay", "numpy"),
    ],
)
def test_a_command_that_is_still_imported_ends_quietly(program: str, module: str, tmp_path: Path) -> None:
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text(WAITS)
    env = environment()
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    # A shell may have had these tests ignore SIGINT, which children inherit.
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("handler", "meanwhile"), [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)]
)
def test_afterwards_interrupts_do_what_they_did_and_what_is_ignored_is_ignored_throughout(
    handler: Any, meanwhile: signal.Handlers
) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with quiet_interrupts():
            assert signal.getsignal(signal.SIGINT) is meanwhile
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


# Stands for what Python and gRPC do at exit, which takes a moment.
CLEANS_UP = """
import atexit, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
def clean_up():
    print("cleaning up", flush=True)
    time.sleep(60)
atexit.register(clean_up)
sys.argv = ["pagekv", "--version"]
from pagekv.client.cli.__main__ import main
sys.exit(main())
"""


def test_a_command_that_has_done_its_work_ends_quietly() -> None:
    """As with an impatient second Ctrl-C of `pagekv up`."""
    with subprocess.Popen(
        [sys.executable, "-c", CLEANS_UP],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)][1] == "cleaning up\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert (process.returncode, err) == (-signal.SIGINT, "")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda signum, frame: None])
def test_other_handlers_stay_to_the_end(handler: Any) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        quiet_interrupts_to_the_end()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
