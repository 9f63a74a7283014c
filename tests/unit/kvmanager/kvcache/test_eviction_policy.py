"""The eviction policies, alone against plain lists and under a pool with the workloads that they are for."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.arrays import ids
from support.engine.cached_prefixes import ROOT, hold
from support.engine.integrity import check_pool
from support.engine.plain_lists import PlainLists
from support.engine.scheduler_driver import Driver

from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import POLICIES, EvictionOrder

SIZE = 4


def num_protected(order: EvictionOrder) -> int:
    """Free blocks that are evicted last."""
    return len(order._protected)


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_the_protected_are_never_more_than_their_share(batch: int) -> None:
    """Of 20 blocks 4, however many become free at once; the one too many falls back before what comes next."""
    order = EvictionOrder(20, "slru", 0.2)
    blocks = order.pop(20)
    for first in range(0, 12, batch):
        for block in blocks[first : first + batch]:
            order.hit(ids([block]))
        order.append(blocks[first : first + batch])
        assert num_protected(order) <= 4
    order = EvictionOrder(20, "slru", 0.2)
    blocks = order.pop(20)
    for block in blocks[:5].tolist():
        order.hit(ids([block]))
        order.append(ids([block]))
    order.append(blocks[5:6])
    assert list(order) == [*blocks[[0, 5, 1, 2, 3, 4]].tolist()]


@given(st.data())
def test_slru_agrees_with_plain_lists(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 24))
    order = EvictionOrder(num_blocks, "slru", data.draw(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])))
    model = PlainLists(num_blocks, order.capacity, order.depth)
    for _ in range(data.draw(st.integers(0, 25))):
        free = model.probation + model.protected
        held = [block for block in range(num_blocks) if block not in free]
        move = data.draw(st.sampled_from(["pop", "append", "remove", "hit", "invalidate", "supersede"]))
        if move == "pop":
            count = data.draw(st.integers(0, len(free)))
            assert order.pop(count).tolist() == model.pop(count)
            continue
        among = {"append": held, "hit": held, "remove": free, "invalidate": free + held, "supersede": free + held}[move]
        blocks = data.draw(st.lists(st.sampled_from(among), unique=True)) if among else []
        if move == "supersede":
            heirs = [block for block in held if block not in blocks][: len(blocks)]
            del blocks[len(heirs) :]
            order.supersede(blocks, heirs)
            model.supersede(blocks, heirs)
        else:
            getattr(order, move)(ids(blocks))
            getattr(model, move)(blocks)
        assert list(order) == model.probation + model.protected
        assert num_protected(order) == len(model.protected) <= order.capacity
    assert len(order) == len(list(order))


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="must be one of lru, slru, got 'fifo'"):
        EvictionOrder(4, "fifo")


# -- under a pool


class Cache:
    """A pool with a policy, and prompts that are read through it. A prompt is a list of words, one block each."""

    def __init__(self, policy: str, num_blocks: int, share: float = 0.2) -> None:
        self.order = EvictionOrder(num_blocks, policy, share)
        self.pool = BlockPool(num_blocks, SIZE, self.order)

    def hold(self, words: list[int]) -> tuple[NDArray[np.int32], int]:
        """The prompt's blocks, held, and how many of them were hits."""
        found = self.cached(words)
        return hold(self.pool, np.repeat(words, SIZE).tolist()), found

    def read(self, words: list[int]) -> int:
        """Reads a prompt and frees it; returns hits."""
        blocks, found = self.hold(words)
        self.pool.free(blocks)
        return found

    def cached(self, words: list[int]) -> int:
        """Leading blocks of the prompt that are cached; changes nothing."""
        chunks = np.repeat(np.array(words, np.uint32), SIZE).reshape(-1, SIZE)
        return len(self.pool.table.trie.match(ROOT, chunks))


class Words:
    """Prompts that share nothing with any other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_a_chain_is_never_cached_behind_a_hole(policy: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deepest first, whatever is proven, held or fallen back. The table drops what follows a block that leaves it, so
    it never has a hole; but nothing is dropped so, because a block is evicted after those that follow it.
    """
    chance = random.Random(seed)
    cache = Cache(policy, 24, chance.choice([0.2, 0.4, 0.9]))
    table = cache.pool.table
    remove = table.remove

    def remove_alone(blocks: NDArray[np.int32]) -> tuple[NDArray[np.int32], list[bytes]]:
        removed, digests = remove(blocks)
        assert sorted(removed.tolist()) == sorted(blocks.tolist()), "blocks followed one that was evicted"
        return removed, digests

    monkeypatch.setattr(table, "remove", remove_alone)
    held: list[NDArray[np.int32]] = []
    for _ in range(400):
        words = [chance.randrange(2) for _ in range(chance.randint(1, 7))]
        if held and (len(held) == 3 or chance.random() < 0.5):
            cache.pool.free(held.pop(chance.randrange(len(held))))
        else:
            held.append(cache.hold(words)[0])
        for block in np.flatnonzero(table.published).tolist():
            parent = table.parent(block)
            assert parent == ROOT or (parent is not None and table.lookup(parent) is not None)
        check_pool(cache.pool, [blocks.tolist() for blocks in held])
    assert cache.pool.evictions > 100


def test_a_prefix_that_cycles_between_one_holder_and_none_outlives_a_burst() -> None:
    """Every time nobody holds the prefix, a burst of strangers takes more blocks than the pool has."""
    hits = {}
    for policy in POLICIES:
        cache, words = Cache(policy, 100), Words()
        prefix = words(2)
        hits[policy] = 0
        for _ in range(20):
            for _ in range(2):
                hits[policy] += cache.read(prefix + words(3)) == len(prefix)
            for _ in range(30):
                assert cache.read(words(5)) == 0
    assert hits == {"lru": 20, "slru": 39}


def test_one_long_context_leaves_the_prefixes_of_short_requests() -> None:
    """Contexts of 128K tokens, 8192 blocks of 16, beside short requests with prefixes of 32 blocks."""
    left = {}
    for policy in POLICIES:
        cache, words = Cache(policy, 10_000), Words()
        prefixes = [words(32) for _ in range(40)]
        for _ in range(2):
            for prefix in prefixes:
                cache.read(prefix + words(4))
        for _ in range(2):
            cache.read(words(8192))
        left[policy] = [sum(cache.cached(prefix) for prefix in prefixes)]
        # Its next turns hit all of it, and are no reason to give more than their share to it.
        context = words(8192)
        for _ in range(3):
            cache.read(context)
            context += words(16)
        left[policy].append(sum(cache.cached(prefix) for prefix in prefixes))
        # Nor did they fall back for it: they outlive another one.
        cache.read(words(8192))
        left[policy].append(sum(cache.cached(prefix) for prefix in prefixes))
    assert left == {"lru": [0, 0, 0], "slru": [1280, 1280, 1280]}


@pytest.mark.parametrize("sampling", [{"n": 3}, {"beam_width": 3}])
def test_a_scan_whose_prompts_fork_is_still_a_scan(sampling: dict[str, Any]) -> None:
    """That the sequences of one request share its blocks does not prove them useful to others."""
    driver, words = Driver(num_blocks=100, protected_share=0.2), iter(range(10_000))
    prefixes = [[*islice(words, 17)] for _ in range(4)]
    for _ in range(2):
        for prefix in prefixes:
            driver.submit(prefix, max_tokens=1)
            driver.drain()
    for _ in range(30):
        driver.submit([*islice(words, 21)], max_tokens=2, **sampling)
        driver.drain()
    again = [driver.submit(prefix, max_tokens=1) for prefix in prefixes]
    driver.drain()
    assert [request.sequences[0].cached_tokens for request in again] == [8] * 4


def test_the_protected_share_is_a_bound() -> None:
    order = EvictionOrder(100, "slru", 0.25)
    blocks = order.pop(60)
    for first in range(0, 60, 3):
        order.hit(blocks[first : first + 3])
    assert (order.capacity, order.depth) == (25, 3)
    order.append(blocks)
    assert num_protected(order) == 25
    # The excess waits behind the other blocks on probation, the oldest first.
    assert list(order) == [*range(60, 100), *range(60)]


def test_what_goes_out_of_use_leaves_the_protected_share() -> None:
    cache, words = Cache("slru", 1000), Words()
    old, new = ([words(10) for _ in range(30)] for _ in range(2))
    for prefixes in (old, new):
        for _ in range(3):
            for prefix in prefixes:
                cache.read(prefix)
    for _ in range(100):
        cache.read(words(50))
    assert sum(cache.cached(prefix) for prefix in old) == 0
    assert sum(cache.cached(prefix) for prefix in new) == 200


def test_a_block_filled_anew_has_to_prove_itself() -> None:
    cache, words = Cache("slru", 10, 0.5), Words()
    first = words(1)
    assert [cache.read(first), cache.read(first)] == [0, 1]
    assert num_protected(cache.order) == 1
    # More than are on probation: the protected block is taken too.
    cache.read(words(10))
    assert (num_protected(cache.order), cache.cached(first)) == (0, 0)
    second = words(1)
    assert [cache.read(second), cache.read(second)] == [0, 1]
    assert cache.pool.clear_prefix_table() == 10
    assert num_protected(cache.order) == 0
    check_pool(cache.pool, [])


@pytest.mark.parametrize("seed", range(3))
def test_without_a_share_slru_is_lru(seed: int) -> None:
    plain, segmented = Cache("lru", 30), Cache("slru", 30, 0.0)
    chance = random.Random(seed)
    for _ in range(300):
        words = [chance.randrange(3) for _ in range(chance.randint(1, 8))]
        assert plain.read(words) == segmented.read(words)
    assert list(plain.order) == list(segmented.order)
