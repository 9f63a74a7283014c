"""A snapshot is of one moment, whatever happens while it is read, and leads to every block from its chain's root."""

from __future__ import annotations

from support.clients.table_reader import Reader, table_of
from support.engine.cached_prefixes import ROOT, cache

from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.events.snapshot import take_snapshot
from pagekv.kvmanager.kvcache.events.subscription import TableWatch

SIZE = 4


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
