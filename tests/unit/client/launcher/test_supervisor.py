"""A stack in the foreground: what signals do to it, and what is told of deaths."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.clients.stand_ins import config

from pagekv.client.launcher.stack import Stack, StackError
from pagekv.client.launcher.supervisor import StopSignals, supervise


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


def test_a_stack_runs_until_a_signal_and_is_stopped(journal: Path) -> None:
    told: list[str] = []
    stack = Stack(config(journal, replicas=2))

    def on_death(report: str) -> None:
        told.append(report)
        os.kill(os.getpid(), signal.SIGTERM)

    supervise(
        stack,
        wait_ready=lambda asked: stack.wait_ready(120, asked),
        on_ready=lambda: stack.children[0].popen.kill(),
        on_death=on_death,
        on_stop=lambda: told.append("stopping"),
    )
    assert told == [
        "the executor 1 was killed by SIGKILL; its last lines:\n  " + stack.children[0].lines[0],
        "stopping",
    ]
    assert all(child.popen.poll() is not None for child in stack.children)


def test_a_stack_of_which_nothing_is_left_is_an_error(journal: Path) -> None:
    stack = Stack(config(journal))
    with pytest.raises(StackError, match="the manager was killed by SIGKILL"):
        supervise(
            stack,
            wait_ready=lambda asked: stack.wait_ready(120, asked),
            on_ready=lambda: stack.children[1].popen.kill(),
            on_death=lambda report: None,
            on_stop=lambda: None,
        )
    assert stack.children[0].popen.poll() == 0


def test_a_signal_before_anything_is_ready_stops_it(journal: Path) -> None:
    told: list[str] = []
    supervise(
        Stack(config(journal)),
        wait_ready=lambda asked: False,
        on_ready=lambda: told.append("ready"),
        on_death=told.append,
        on_stop=lambda: told.append("stopping"),
    )
    assert told == ["stopping"]
