"""A rank behind rank 0 reports in order, also of backends that compute behind the launch; and ends with the group."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import pytest
from support.executor.rank_group import LIMITS, MODEL, TIMEOUT_S, message
from support.waiting import wait_until

from pagekv.executor.backend.interface import Backend, Sampled, Scheduled
from pagekv.executor.oracle.backend import OracleBackend
from pagekv.executor.ranks.follower import LEADER, Follower
from pagekv.executor.ranks.link import Kind, RankLink
from pagekv.executor.ranks.reports import RankReport
from pagekv.executor.ranks.watch import RankWatch


@contextmanager
def following(backend: Backend) -> Iterator[tuple[RankLink, list[str], threading.Thread]]:
    """Rank 0's end of the link, why the rank would have ended, and its thread."""
    one, other = socket.socketpair()
    lost: list[str] = []
    far, link = RankLink(other), RankLink(one)
    follower = Follower(RankWatch({LEADER: far}, TIMEOUT_S, lost.append))
    thread = threading.Thread(target=follower.run, args=(backend,), daemon=True)
    thread.start()
    link.send_json(Kind.ALLOCATE, [4, 20, 0])
    assert link.receive(TIMEOUT_S).content == {}
    limits = {**asdict(LIMITS), "features": sorted(LIMITS.features)}
    link.send_json(Kind.EPOCH, {"epoch": 5, "limits": limits})
    yield link, lost, thread
    link.send(Kind.BYE)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    far.close()
    link.close()


def reports(link: RankLink, count: int) -> list[RankReport]:
    found: list[RankReport] = []
    while len(found) < count:
        received = link.receive(TIMEOUT_S)
        if received.kind is Kind.REPORT:
            found.append(RankReport.from_bytes(received.data))
    return found


def test_reports_are_in_order_and_the_same_whether_a_step_takes_time() -> None:
    digests = []
    for step_time_s in (0.0, 0.002):
        with following(OracleBackend(MODEL, step_time_s=step_time_s)) as (link, lost, _):
            for number in range(1, 30):
                link.send(Kind.STEP, message(number).SerializeToString())
            found = reports(link, 29)
        assert [(each.epoch, each.step) for each in found] == [(5, number) for number in range(1, 30)]
        assert not lost
        digests.append([each.digest for each in found])
    assert digests[0] == digests[1]


def test_after_a_failed_step_the_rank_waits_for_another_epoch() -> None:
    with following(OracleBackend(MODEL)) as (link, lost, _):
        for number in (1, 3, 4):
            link.send(Kind.STEP, message(number).SerializeToString())
        reports(link, 1)
        received = link.receive(TIMEOUT_S)
        assert received.kind is Kind.FAILED
        assert received.content["step"] == 2
        assert "it refused the step: step: must be 2" in received.content["reason"]
        link.send_json(Kind.ALLOCATE, [4, 20, 0])
        assert link.receive(TIMEOUT_S).content == {}
        assert not lost


def test_a_refusal_is_told_behind_the_reports_of_steps_under_way() -> None:
    with following(OracleBackend(MODEL, step_time_s=0.2)) as (link, lost, _):
        for number in (1, 2, 4):
            link.send(Kind.STEP, message(number).SerializeToString())
        told: list[Kind] = []
        while len(told) < 3:
            received = link.receive(20)
            if received.kind is not Kind.BEAT:
                told.append(received.kind)
        assert told == [Kind.REPORT, Kind.REPORT, Kind.FAILED]
        assert not lost


def test_why_rank_0_ends_is_why_the_others_do() -> None:
    with following(OracleBackend(MODEL)) as (link, lost, _):
        link.say_last("out of memory")
        wait_until(lambda: lost)
    assert lost == ["rank 0 ends: out of memory"]


@pytest.mark.parametrize("says", [True, False], ids=["it says so", "it cannot say"])
def test_a_rank_that_cannot_go_on_tells_so_and_ends(says: bool) -> None:
    class Lost(OracleBackend):
        def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
            raise RuntimeError("in the middle of a collective")

        def is_lost(self, error: Exception) -> bool:
            if not says:
                raise OSError("the driver is gone")
            return True

    with following(Lost(MODEL)) as (link, lost, _):
        link.send(Kind.STEP, message(1).SerializeToString())
        assert link.receive(TIMEOUT_S).kind is Kind.FAILED
        last = link.receive(TIMEOUT_S)
        wait_until(lambda: lost)
    assert lost == ["step 1 failed on this rank: RuntimeError: in the middle of a collective"]
    assert (last.kind, last.content) == (Kind.ENDS, lost[0])
