"""Pauses of an outage double within their bounds, and end with the time that there is for it."""

from __future__ import annotations

import logging
import threading

import pytest

from pagekv.client import errors
from pagekv.client.outage import LONGEST_PAUSE_S, LONGEST_PAUSE_UNANSWERED_S, Outage, Pauses


@pytest.fixture(autouse=True)
def whole_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 1.0)


@pytest.mark.parametrize(
    ("error", "longest"),
    [(errors.ConnectionLost("lost"), LONGEST_PAUSE_UNANSWERED_S), (errors.Unavailable("not yet"), LONGEST_PAUSE_S)],
)
def test_pauses_double_up_to_a_bound_and_begin_again_with_the_next_outage(
    error: errors.PageKVError, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting = Outage(60, lambda: 0.0, logging.getLogger("test"))
    assert not lasting.under_way
    pauses = [lasting.pause_s(error) for _ in range(6)]
    assert pauses[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert pauses[-1] == longest
    assert lasting.under_way
    lasting.end()
    assert not lasting.under_way
    assert lasting.pause_s(error) == pytest.approx(0.1)
    # Half of each is by chance.
    monkeypatch.setattr("random.random", lambda: 0.0)
    assert lasting.pause_s(error) == pytest.approx(0.1)


def test_no_pause_is_longer_than_the_time_left_whatever_is_asked_for() -> None:
    now = 0.0
    lasting = Outage(10, lambda: now, logging.getLogger("test"))
    error = errors.Unavailable("not yet")
    assert lasting.pause_s(error, least_s=4.0) == 4.0
    now = 9.5
    assert lasting.pause_s(error, least_s=4.0) == 0.5
    now = 10.0
    assert lasting.pause_s(error, least_s=4.0) is None


def test_without_time_there_is_no_pause_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Outage(0, lambda: 0.0, logging.getLogger("test")).pause_s(errors.Unavailable("gone")) is None
    assert caplog.records == []


def test_closing_ends_the_pauses_under_way_and_those_that_begin_later() -> None:
    pauses, over, under_way, later = Pauses(), threading.Event(), threading.Event(), threading.Event()
    pauses.begin(over)
    pauses.end(over)
    pauses.begin(under_way)
    assert not under_way.is_set()
    pauses.close()
    pauses.begin(later)
    assert (over.is_set(), under_way.is_set(), later.is_set(), pauses.closed) == (False, True, True, True)
