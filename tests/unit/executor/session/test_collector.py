"""Jobs run in the order in which they are given, whichever thread runs them."""

from __future__ import annotations

import asyncio
import threading

from support.event_loop import in_event_loop

from pagekv.executor.session.collector import Collector


@in_event_loop
async def test_jobs_that_are_ready_run_at_once_unless_one_before_them_is_waited_for() -> None:
    seen: list[tuple[int, bool]] = []
    gate = threading.Event()
    giver = threading.get_ident()

    def note(number: int) -> None:
        seen.append((number, threading.get_ident() == giver))

    def late(number: int) -> None:
        assert gate.wait(60)
        note(number)

    collector = Collector()
    await collector.wait()
    collector.run(lambda: note(1), True)
    assert seen == [(1, True)]
    collector.run(lambda: late(2), False)
    collector.run(lambda: note(3), True)
    assert seen == [(1, True)]
    gate.set()
    await collector.wait()
    assert seen == [(1, True), (2, False), (3, False)]
    collector.run(lambda: note(4), True)
    await collector.wait()
    assert [number for number, _ in seen] == [1, 2, 3, 4]


def test_a_thread_that_has_nothing_left_is_passed_by_again() -> None:
    where: list[int] = []

    async def test() -> None:
        collector = Collector()
        for ready in (False, True):
            collector.run(lambda: where.append(threading.get_ident()), ready)
            await collector.wait()

    asyncio.run(test())
    assert where[0] != threading.get_ident()
    assert where[1] == threading.get_ident()
