"""The pauses between attempts to drive an executor."""

from __future__ import annotations

from pagekv.kvmanager.engine.recovery import RECONNECT_FIRST_S, RECONNECT_LAST_S, UNREACHABLE_S, Reconnect


def test_pauses_grow_while_epochs_fail_and_begin_anew_after_a_step() -> None:
    reconnect = Reconnect()
    pauses = [reconnect.pause_s(attached=True, steps=0) for _ in range(8)]
    assert pauses[0] == RECONNECT_FIRST_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == RECONNECT_LAST_S
    assert reconnect.pause_s(attached=True, steps=1) == RECONNECT_FIRST_S


def test_an_executor_that_is_away_is_asked_often() -> None:
    """And between two epochs that fail, it changes nothing about their pauses."""
    reconnect = Reconnect()
    assert max(reconnect.pause_s(attached=False, steps=0) for _ in range(50)) == UNREACHABLE_S
    assert reconnect.pause_s(attached=True, steps=0) == RECONNECT_LAST_S
