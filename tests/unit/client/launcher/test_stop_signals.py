"""The signals that end a stack in the foreground: the first asks, the second kills."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from support.clients.stand_ins import config

from pagekv.client.launcher.stack import Stack
from pagekv.client.launcher.stop_signals import StopSignals


def test_signals_ask_first_and_kill_second(journal: Path) -> None:
    with Stack(config(journal, manager="deaf")) as stack:
        stack.start()
        stack.wait_ready(120)
        before = signal.getsignal(signal.SIGINT)
        with StopSignals(stack) as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.wait(60)
            assert stack.children[1].popen.poll() is None
            os.kill(os.getpid(), signal.SIGINT)
            assert stack.children[1].popen.wait(60) == -signal.SIGKILL
        assert signal.getsignal(signal.SIGINT) is before


def test_hanging_up_is_ignored_where_it_was_before(journal: Path) -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(Stack(config(journal))) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.wait(0)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_at_any_moment_of_a_wait_is_heard(journal: Path) -> None:
    """At the call of each function below `wait`, where Python looks for signals. An Event would hang at some."""

    def interrupted(signals: StopSignals, number: int) -> int:
        """Sends a signal at a call of this number; how many calls there were."""
        calls = 0

        def trace(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGTERM)

        sys.settrace(trace)
        try:
            signals.wait(0.001)
        finally:
            sys.settrace(None)
        return calls

    with Stack(config(journal)) as stack:
        with StopSignals(stack) as signals:
            calls = interrupted(signals, 0)
        # `wait` itself and what is below it.
        assert calls > 1
        for number in range(1, calls + 1):
            with StopSignals(stack) as signals:
                interrupted(signals, number)
                assert signals.wait(0)
