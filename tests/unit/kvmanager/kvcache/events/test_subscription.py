"""One reader's watch: snapshot, unread changes, its bound and its end."""

from __future__ import annotations

import asyncio

import pytest
from support.clients.table_reader import Reader, table_of
from support.engine.cached_prefixes import ROOT, cache
from support.event_loop import in_event_loop

from pagekv.common.errors import FellBehind, Unavailable
from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.batch import Diff, Stored, Tier
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.events.subscription import TableWatch, take_snapshot

SIZE = 4


def change(number: int) -> Diff:
    diff = Diff()
    diff.store(Stored(Tier.DEVICE, [bytes([number]) * 32], [ROOT], b"\0" * 4 * SIZE))
    return diff


def test_the_snapshot_names_parents_before_children() -> None:
    pool = BlockPool(40, SIZE)
    for prompt in ([*range(12)], [*range(8), 5, 5, 5, 5, 6], [7] * 20, [*range(4), *range(4)]):
        cache(pool, prompt)
    seen: set[bytes] = set()
    for stored in take_snapshot(pool.table):
        for digest, parent, _ in stored.each():
            assert parent == ROOT or parent in seen
            assert stored.first == (parent == ROOT)
            seen.add(digest)
    assert len(seen) == pool.num_published == 10


def test_the_snapshot_is_of_the_moment_when_it_was_taken() -> None:
    pool = BlockPool(10, SIZE)
    cache(pool, [*range(8)])
    before, snapshot = table_of(pool), take_snapshot(pool.table)
    pool.clear_prefix_table()
    cache(pool, [9] * 8)
    assert Reader(TableWatch(snapshot, lambda watch: None, 0)).table == before


def test_blocks_that_tokens_alone_do_not_lead_to_are_told_apart() -> None:
    """Blocks with media and what follows them, as they enter and in a snapshot."""
    log = TableLog()
    pool = BlockPool(10, SIZE, log=log)
    log.attach(pool.table)
    watch = log.watch()
    cache(pool, [*range(16)], media=(MediaSpan(5, 2, "picture"),))
    log.step_boundary(1)
    for found in (watch.take_unread().stored, log.watch().take_snapshot(99)):
        assert [stored.text for stored in found for _ in stored.digests] == [True, False, False, False]


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
