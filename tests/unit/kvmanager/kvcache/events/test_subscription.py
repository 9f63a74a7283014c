"""One reader's watch: unread changes, its bound and its end."""

from __future__ import annotations

import asyncio

import pytest
from support.engine.cached_prefixes import ROOT
from support.event_loop import in_event_loop

from pagekv.common.errors import FellBehind, Unavailable
from pagekv.kvmanager.kvcache.events.batch import Diff, Stored, Tier
from pagekv.kvmanager.kvcache.events.subscription import TableWatch

SIZE = 4


def change(number: int) -> Diff:
    diff = Diff()
    diff.store(Stored(Tier.DEVICE, [bytes([number]) * 32], [ROOT], b"\0" * 4 * SIZE))
    return diff


@in_event_loop
async def test_a_reader_gets_everything_since_it_last_read() -> None:
    watch = TableWatch(iter(()), lambda watch: None, 0)
    waiting = asyncio.create_task(watch.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    watch.push(change(1), 1)
    watch.push(change(2), 2)
    taken = await waiting
    assert (taken.size, len(taken.stored)) == (2, 2)
    assert watch.take_unread().size == 0


def test_a_reader_that_falls_behind_is_dropped() -> None:
    ended: list[TableWatch] = []
    watch = TableWatch(iter(()), ended.append, 0, max_unread=2)
    for number in range(3):
        assert not ended
        watch.push(change(number), number)
    assert ended == [watch]
    with pytest.raises(FellBehind, match="more than 2 changes"):
        asyncio.run(watch.take())
    with pytest.raises(FellBehind):
        watch.take_snapshot(1)


@in_event_loop
async def test_a_reader_that_waits_is_told_of_the_end() -> None:
    watch = TableWatch(iter(()), lambda watch: None, 0)
    waiting = asyncio.create_task(watch.take())
    await asyncio.sleep(0)
    watch.fail(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        async with asyncio.timeout(60):
            await waiting


def test_an_ended_watch_has_nothing_unread_and_ends_once() -> None:
    ended: list[TableWatch] = []
    watch = TableWatch(iter(()), ended.append, 0)
    watch.push(change(1), 1)
    watch.close()
    watch.close()
    assert (ended, watch.take_unread().size) == ([watch], 0)
    watch.fail(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        asyncio.run(watch.take())
    assert ended == [watch]
