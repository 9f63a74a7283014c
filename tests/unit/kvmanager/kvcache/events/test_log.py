"""The log of the prefix tables: what watches get at step boundaries, and what is remembered of removed blocks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from support.clients.table_reader import Reader, WatchedDriver, host_table_of, table_of
from support.clock import Clock
from support.engine.cached_prefixes import ROOT, cache, evict_all, hold

from pagekv.common.errors import InvalidRequest, Overloaded, RevisionGone, Unavailable
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events import log as log_module
from pagekv.kvmanager.kvcache.events.batch import Tier
from pagekv.kvmanager.kvcache.events.log import MAX_WATCHES, TableLog
from pagekv.kvmanager.kvcache.events.removal_history import Removal
from pagekv.kvmanager.kvcache.host_pool import HostPool

SIZE = 4


def logged_pool(num_blocks: int = 10, clock: Clock | None = None) -> tuple[BlockPool, TableLog]:
    log = TableLog(clock or Clock())
    pool = BlockPool(num_blocks, SIZE, log=log)
    log.attach(pool.table)
    return pool, log


def digests_of(prompt: list[int]) -> list[bytes]:
    return chain_digests(ROOT, token_bytes(prompt), SIZE)


def test_a_watch_begins_with_the_table_and_gets_one_batch_per_boundary_with_changes() -> None:
    pool, log = logged_pool()
    cache(pool, [*range(8)])
    reader = Reader(log.watch())
    assert reader.table == table_of(pool)
    assert list(reader.table) == digests_of([*range(8)])
    cache(pool, [*range(8), *range(50, 54)])
    assert not reader.read()
    log.step_boundary(1)
    assert reader.read()
    assert reader.table == table_of(pool)
    log.step_boundary(2)
    assert not reader.read()
    pool.clear_prefix_table()
    cache(pool, [9] * 4)
    log.step_boundary(3)
    assert reader.read()
    assert reader.table == table_of(pool)
    assert len(reader.table) == 1


def test_what_comes_and_goes_between_two_boundaries_is_left_out() -> None:
    pool, log = logged_pool(4)
    cache(pool, [1] * 8)
    watch = log.watch()
    log.step_boundary(1)
    # Evicts both blocks for two others, evicts these for the same two as at first.
    for prompt in ([2] * 16, [3] * 16, [1] * 8):
        cache(pool, prompt)
    log.step_boundary(2)
    diff = asyncio.run(watch.take())
    changed = {digest for removed in diff.removed for digest in removed.digests}
    changed |= {digest for stored in diff.stored for digest in stored.digests}
    assert digests_of([1] * 8)[0] not in changed
    assert digests_of([2] * 16)[0] not in changed
    reader = Reader(log.watch())
    assert reader.table == table_of(pool)


def keep(host: HostPool, prompt: list[int], index: int) -> None:
    """Does what a swap or a write-back does: the prompt's block `index` goes into the host pool, unless it is there."""
    digests = digests_of(prompt)
    tokens = np.array([prompt[index * SIZE : (index + 1) * SIZE]], np.uint32)
    blocks, _ = host.keep([digests[index]], tokens, [digests[index - 1] if index else ROOT])
    host.release(blocks)


@pytest.mark.parametrize("seed", range(20))
def test_readers_hold_exactly_both_tables_at_every_boundary(seed: int) -> None:
    """Random histories in pools that are far too small, with media and without; the slow reader looks now and then
    only. On the device parents come before their children and leave with them at the latest; the host pool also keeps
    blocks whose parents it has lost.
    """
    rng = random.Random(seed)
    log = TableLog(Clock())

    def new_pools() -> tuple[BlockPool, HostPool]:
        pool, host = BlockPool(12, SIZE, log=log), HostPool(6, SIZE, log)
        log.attach(pool.table, host)
        return pool, host

    pool, host = new_pools()
    keen, slow = Reader(log.watch()), Reader(log.watch())
    late: list[Reader] = []
    evictions = gaps = 0
    for step in range(200):
        for _ in range(rng.randrange(3)):
            move, prompt = rng.random(), [rng.randrange(2) for _ in range(rng.randrange(SIZE, 20))]
            span = MediaSpan(rng.randrange(len(prompt)), 1, rng.choice(["cat", "dog"]))
            media = (span,) if rng.random() < 0.5 else ()
            if move < 0.45:
                cache(pool, prompt, media=media)
            elif move < 0.85:
                keep(host, prompt, rng.randrange(len(prompt) // SIZE))
            elif move < 0.9:
                host.clear()
                pool.clear_prefix_table()
            elif move < 0.95:
                evictions += host.evictions
                pool, host = new_pools()
            else:
                held = hold(pool, prompt, media=media)
                if rng.random() < 0.5:
                    # The front is let go first: what follows leaves with it.
                    pool.free(held[:1])
                    held = held[1:]
                evict_all(pool)
                pool.free(held)
        log.step_boundary(step)
        tables = table_of(pool), host_table_of(host)
        gaps += any(parent != ROOT and parent not in tables[1] for parent, _ in tables[1].values())
        for reader in (keen, *late, *([slow] if rng.random() < 0.1 else [])):
            reader.read()
            assert (reader.table, reader.host_table) == tables
        if rng.random() < 0.05:
            late.append(Reader(log.watch()))
        if late and rng.random() < 0.05:
            late.pop().watch.close()
    slow.read()
    assert (slow.table, slow.host_table) == tables
    assert log.num_watches == 2 + len(late)
    assert evictions
    assert gaps


class ReadDriver(WatchedDriver):
    """A reader is held against both tables after every step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reader = Reader(self.watch)

    def check(self) -> None:
        super().check()
        self.reader.read()
        assert self.reader.table == table_of(self.pool)
        assert self.reader.host_table == host_table_of(self.host)
        whose = {
            digest: request.names
            for request in self.requests
            for sequence in request.sequences
            for digest in sequence.digests
        }
        late = Reader(self.log.watch())
        late.watch.close()
        for reader in (self.reader, late):
            for tier in Tier:
                for digest in reader.of(tier):
                    assert reader.names[tier, digest] == whose.get(digest, reader.names[tier, digest])
        named = [digest for digest in late.table if whose.get(digest)]
        assert len(named) <= len(self.pool.table._names) + len(late.host_table)
        self.most_named = max(getattr(self, "most_named", 0), len(named))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_tell_their_namespace_and_adapter_in_both_tiers(seed: int) -> None:
    """Also first blocks that fill while decoding, copies that take an entry over, and blocks with media."""
    rng = random.Random(seed)
    driver = ReadDriver(num_blocks=16, block_size=4, host_blocks=12, preemption="swap", write_back=True)
    identities = [CacheIdentity(), CacheIdentity("n"), CacheIdentity("n", "a"), CacheIdentity("", "a"),
                  CacheIdentity("n", media=(MediaSpan(5, 2, "picture"),))]  # fmt: skip  # a list of five
    for _ in range(40):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        identity = rng.choice(identities if len(prompt) > 7 else identities[:4])
        driver.submit(prompt, max_tokens=rng.randrange(1, 12), identity=identity)
        for _ in range(rng.randrange(6)):
            driver.step()
    driver.drain()
    driver.check()
    assert driver.most_named > 3
    assert min(driver.scheduler.counters.swapped_out + driver.scheduler.counters.written_back, 3) == 3
    driver.scheduler.clear_prefix_cache()
    assert not driver.pool.table._names
    assert not driver.host._names


def test_a_reader_holds_both_tables_through_swaps_write_back_resets_and_lost_executors() -> None:
    """The real scheduler over two tiers that are both too small."""
    rng = random.Random(0)
    driver = ReadDriver(num_blocks=16, block_size=4, host_blocks=12, preemption="swap", write_back=True)
    families = [[rng.randrange(90) for _ in range(16)] for _ in range(4)]
    most_kept = 0
    for round_number in range(60):
        prompt = rng.choice(families)[: rng.randrange(4, 17)] + [rng.randrange(90) for _ in range(rng.randrange(1, 8))]
        driver.submit(prompt, max_tokens=rng.randrange(1, 12), beam_width=rng.choice([0, 0, 2]))
        for _ in range(rng.randrange(8)):
            driver.step()
            most_kept = max(most_kept, len(driver.reader.host_table))
        if round_number % 20 == 9:
            driver.scheduler.preempt_all()
            driver.scheduler.clear_prefix_cache()
            driver.check()
        if round_number % 20 == 19:
            driver.lose_executor()
            driver.check()
    driver.drain()
    counters = driver.scheduler.counters
    assert min(counters.swapped_out, counters.swapped_in, counters.written_back, most_kept) > 5


def test_nothing_is_kept_before_the_first_watch_nor_long_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_HELD", 4)
    pool, log = logged_pool()
    cache(pool, [3] * 8)
    log.step_boundary(1)
    assert (log._pending.size, len(log._held), log.watched) == (0, 0, False)
    watch = log.watch()
    cache(pool, [1] * 8)
    watch.close()
    log.step_boundary(2)
    assert (len(log._held), log.num_watches, log.watched) == (1, 0, True)
    cache(pool, [2] * 12)
    log.step_boundary(3)
    assert (len(log._held), log._held_size, log.watched) == (0, 0, False)
    cache(pool, [4] * 8)
    evict_all(pool)
    keep(HostPool(1, SIZE, log), [2] * 8, 0)
    assert log._pending.size == 0
    with pytest.raises(RevisionGone, match=f"the changes after revision {watch.revision} are no longer held"):
        log.watch(watch.revision)
    assert log.watch().revision > watch.revision + 2


def test_revisions_rise_with_every_change_and_are_the_same_for_all() -> None:
    pool, log = logged_pool()
    first, second = log.watch(), log.watch()
    assert first.revision == second.revision == 1
    for step, prompt in enumerate(([1] * 4, [2] * 4, [2] * 4)):
        cache(pool, prompt)
        log.step_boundary(step)
        first.take_unread()
    second.take_unread()
    assert first.revision == second.revision == log.watch().revision == 3
    with pytest.raises(InvalidRequest, match="start_revision: must be at most 3, got 4"):
        log.watch(4)


@pytest.mark.parametrize("seed", range(10))
def test_readers_that_come_back_miss_nothing_or_are_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random histories with a small bound: each reader goes on from its revision, or begins anew where it is gone."""
    monkeypatch.setattr(log_module, "MAX_HELD", 30)
    rng = random.Random(seed)
    pool, log = logged_pool(12)
    reader, away = Reader(log.watch()), 0
    came_back = gone = 0
    for step in range(400):
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.95:
                cache(pool, [rng.randrange(2) for _ in range(rng.randrange(20))])
            else:
                pool.clear_prefix_table()
        log.step_boundary(step)
        if away:
            away -= 1
            if not away:
                try:
                    reader.watch = log.watch(reader.watch.revision)
                    came_back += 1
                except RevisionGone:
                    reader = Reader(log.watch())
                    gone += 1
        if not away:
            reader.read()
            assert reader.table == table_of(pool)
            if rng.random() < 0.2:
                reader.watch.close()
                away = rng.randrange(1, 20)
    assert min(came_back, gone) > 3


def test_watches_are_limited_and_end_together() -> None:
    _, log = logged_pool()
    watches = [log.watch() for _ in range(MAX_WATCHES)]
    with pytest.raises(Overloaded, match="16 readers watch") as refused:
        log.watch()
    # A watch that is resumed comes again after this time.
    assert (refused.value.retry_delay_s, refused.value.limit) == (1.0, 16)
    watches[3].close()
    log.watch()
    log.end_watches(Unavailable("over"))
    assert log.num_watches == 0
    with pytest.raises(Unavailable, match="over"):
        asyncio.run(watches[0].take())
    with pytest.raises(Unavailable, match="over"):
        watches[0].take_snapshot(1)


def test_evictions_are_remembered_with_step_and_time() -> None:
    """An eviction can be looked up afterwards, so that explanations can name it."""
    clock = Clock()
    pool, log = logged_pool(clock=clock)
    (digest,) = digests_of([1] * 4)
    cache(pool, [1] * 4)
    log.step_boundary(7)
    assert log.removed_ago(digest) is None
    evict_all(pool)
    assert log.removed_ago(digest) == Removal(cleared=False, steps=0, seconds=0)
    log.step_boundary(9)
    clock.now += 2.5
    assert log.removed_ago(digest) == Removal(cleared=False, steps=2, seconds=2.5)
    cache(pool, [1] * 4)
    evict_all(pool)
    assert log.removed_ago(digest) == Removal(cleared=False, steps=0, seconds=0)
    cache(pool, [1] * 4)
    pool.clear_prefix_table()
    assert log.removed_ago(digest) == Removal(cleared=True, steps=0, seconds=0)


def test_a_lost_executor_clears_the_table() -> None:
    pool, log = logged_pool()
    cache(pool, [1] * 4)
    reader = Reader(log.watch())
    pool = BlockPool(10, SIZE, log=log)
    log.attach(pool.table)
    (digest,) = digests_of([1] * 4)
    assert log.removed_ago(digest) == Removal(cleared=True, steps=0, seconds=0)
    log.step_boundary(1)
    assert log.removed_ago(digest) == Removal(cleared=True, steps=1, seconds=0)
    assert reader.read()
    assert reader.table == {}


def test_an_empty_table_that_is_cleared_is_still_a_change_of_a_watched_one() -> None:
    pool, log = logged_pool()
    watch = log.watch()
    pool.clear_prefix_table()
    log.step_boundary(1)
    diff = asyncio.run(watch.take())
    assert diff.cleared
