"""The signals that end a stack in the foreground: the first asks, the second kills."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from support.clients.stand_ins import config

from pagekv.client.launcher.stack import Stack, StopSignals


def test_signals_ask_first_and_kill_second(journal: Path) -> None:
    with Stack(config(journal, manager="deaf")) as stack:
        stack.start()
        stack.wait_ready(120)
        before = signal.getsignal(signal.SIGINT)
        with StopSignals(stack) as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked.wait(60)
            assert stack.children[1].popen.poll() is None
            os.kill(os.getpid(), signal.SIGINT)
            assert stack.children[1].popen.wait(60) == -signal.SIGKILL
        assert signal.getsignal(signal.SIGINT) is before
