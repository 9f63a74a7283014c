"""Ctrl-C while a command imports its modules: no traceback, whatever is being imported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.clients.stack import environment

from pagekv.common.interrupts import quiet_interrupts

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


def test_afterwards_an_interrupt_is_an_exception_again() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with quiet_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_ignores_interrupts_goes_on_ignoring_them() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with quiet_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
