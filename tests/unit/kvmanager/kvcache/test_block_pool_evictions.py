"""Evictions of many blocks at once: what holds at once, and what is done by and by."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.engine.cached_prefixes import ROOT, hold
from support.engine.scheduler_driver import small_driver

from pagekv.kvmanager.kvcache import block_pool, digest_map
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.events.removal_history import Removal
from pagekv.kvmanager.observe.recording.step_recorder import plan_columns


def test_a_large_eviction_leaves_the_work_for_each_block_to_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing finds the blocks any more, watches are told, and explanations know when: at once."""
    monkeypatch.setattr(block_pool, "RETIRED_TOGETHER", 4)
    log = TableLog(lambda: 7.0)
    pool = BlockPool(8, 1, log=log)
    log.attach(pool.table)
    tokens = [1, 2, 3, 4, 5]
    chain, digests = hold(pool, tokens), chain_digests(ROOT, token_bytes(tokens), 1)
    pool.free(chain)
    watch = log.watch()
    log.step_boundary(3)
    taken = pool.allocate(8)
    assert taken is not None
    assert pool.table.map.retired.count == 5
    assert len(pool.table.map.block_of) == 5
    assert (pool.num_published, pool.evictions) == (0, 5)
    assert [pool.table.lookup(digest) for digest in digests] == [None] * 5
    assert [pool.table.digest(block) for block in chain.tolist()] == [None] * 5
    log.step_boundary(5)
    (removed,) = watch.take_unread().removed
    assert sorted(removed.digests) == sorted(digests)
    for _ in range(2):
        assert [log.removed_ago(digest) for digest in digests] == [Removal(False, 2, 0.0)] * 5
        pool.table.map.sweep()
    assert pool.table.map.block_of == {}


def test_twins_of_other_blocks_do_not_hold_up_a_large_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held block that follows an evicted one leaves the table with it, and is found under no twin of it either."""
    monkeypatch.setattr(block_pool, "RETIRED_TOGETHER", 2)
    pool = BlockPool(8, 1)

    def publish(block: int, token: int, parent: bytes, first: bool) -> bytes:
        (digest,) = chain_digests(parent, token_bytes([token]), 1)
        row = np.array([[token]], np.uint32)
        pool.publish_chain(np.array([block], np.int32), [digest], parent, row, first=first, media=False)
        return digest

    held = pool.allocate(6)
    assert held is not None
    a, twin_of_a, parent, spare, child, twin_of_child = held.tolist()
    kept = publish(a, 1, ROOT, True)
    publish(twin_of_a, 1, ROOT, True)
    before = publish(parent, 2, ROOT, True)
    publish(spare, 3, ROOT, True)
    gone = publish(child, 4, before, False)
    publish(twin_of_child, 4, before, False)
    pool.free(np.array([parent, spare], np.int32))
    assert (len(pool.table._twins), pool.num_published) == (2, 4)
    taken = pool.allocate(4)
    assert taken is not None
    # The parent, the spare one and, with its parent, the child.
    assert pool.table.map.retired.count == 3
    assert pool.num_published == 1
    assert (pool.table.lookup(kept), pool.table.lookup(gone)) == (a, None)
    assert [pool.table.is_entered(block) for block in (twin_of_a, child, twin_of_child)] == [True, False, False]
    # The copies of either content are freed as ever.
    pool.free(np.array([child, a], np.int32))
    assert (pool.table.lookup(kept), pool.table.lookup(gone)) == (twin_of_a, None)
    pool.free(np.array([twin_of_child, twin_of_a], np.int32))
    assert not pool.table.has_twins


@pytest.mark.parametrize("seed", range(12))
def test_no_decision_depends_on_when_the_work_for_evicted_blocks_is_done(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random requests over a small pool, every eviction a retirement or none."""
    plans, retired = [], [0, 0]
    for at, together in enumerate((1, 10**9)):
        monkeypatch.setattr(block_pool, "RETIRED_TOGETHER", together)
        monkeypatch.setattr(digest_map, "SWEPT", 1)
        chance = random.Random(seed)
        driver = small_driver(seed, chance)
        for _ in range(60):
            prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 24))]
            media = (MediaSpan(chance.randrange(len(prompt)), 1, "cat"),) if not chance.randrange(9) else ()
            identity = CacheIdentity(chance.choice(["", "", "n"]), "", media, read=chance.random() < 0.9)
            shape: dict[str, Any] = chance.choice([{}, {}, {"n": 3}, {"beam_width": 2}])
            driver.submit(prompt, chance.randrange(1, 8), identity=identity, **shape)
            for _ in range(chance.randrange(8)):
                driver.step()
                retired[at] += driver.pool.table.map.retired.count
            move = chance.randrange(30)
            if move == 0:
                driver.lose_executor()
            elif move == 1:
                driver.scheduler.preempt_all()
                driver.scheduler.clear_prefix_cache()
        driver.drain()
        plans.append([plan_columns(plan) for plan in driver.plans])
    assert plans[0] == plans[1]
    assert retired[0] > 5
    assert retired[1] == 0
