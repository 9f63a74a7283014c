"""Blocks of several tenants: by whom they are lost, against a plain model and under a pool."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.engine.arrays import ids
from support.engine.integrity import check_pool
from support.engine.plain_tenants import PlainTenants

from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.tenant_order import MAX_TENANT, TenantOrder

NO_BLOCKS = np.empty(0, np.int32)


@given(st.data())
def test_it_agrees_with_plain_lists(data: st.DataObject) -> None:
    """Every victim, in random histories; floors and weights change meanwhile."""
    num_blocks, num_tenants = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 5))
    published = np.zeros(num_blocks, np.bool_)
    before = EvictionOrder(num_blocks, "slru", data.draw(st.sampled_from([0.0, 0.3, 1.0])))
    order, model = TenantOrder(before, published), PlainTenants(num_blocks, before.capacity)
    tenants = st.integers(0, num_tenants - 1)
    for _ in range(data.draw(st.integers(0, 20))):
        free = [block for tenant in range(num_tenants) for block in model.cached(tenant)]
        held = [block for block in model.owner if block not in free]
        move = data.draw(
            st.sampled_from(["take", "take", "append", "append", "remove", "hit", "invalidate", "supersede", "set"])
        )
        if move == "take":
            tenant, count = data.draw(tenants), data.draw(st.integers(0, num_blocks))
            can = order.num_free_for(tenant, NO_BLOCKS)
            wanted = model.take(count, tenant)
            assert (wanted is not None) == (count <= can)
            if wanted is not None:
                assert sorted(order.take(count, tenant).tolist()) == sorted(wanted)
                published[wanted] = False
                filled = data.draw(st.lists(st.sampled_from(wanted), unique=True)) if wanted else []
                published[filled] = True
        elif move == "set":
            weights = data.draw(st.dictionaries(tenants, st.sampled_from([0.1, 0.5, 1.0, 3.0])))
            left, floors = num_blocks, {}
            for tenant in data.draw(st.lists(tenants, unique=True)):
                floors[tenant] = data.draw(st.integers(0, left))
                left -= floors[tenant]
            order.configure(weights, floors)
            model.weights, model.floors = weights, floors
        else:
            among = {"append": held, "hit": held, "remove": free, "invalidate": free + held, "supersede": free}[move]
            blocks = data.draw(st.lists(st.sampled_from(among), unique=True)) if among else []
            if move == "append":
                order.append(ids(blocks))
                model.append(blocks, set(np.flatnonzero(published).tolist()))
            elif move == "supersede":
                heirs = [block for block in held if not published[block]][: len(blocks)]
                del blocks[len(heirs) :]
                published[blocks], published[heirs] = False, True
                order.supersede(blocks, heirs)
                model.supersede(blocks, heirs)
            else:
                if move == "invalidate":
                    published[blocks] = False
                if move == "hit":
                    blocks = [block for block in blocks if published[block]]
                getattr(order, move)(ids(blocks))
                getattr(model, move)(blocks)
        assert list(order._blank) == model.blank
        for tenant in range(num_tenants):
            assert order.footprint(tenant) == model.footprint(tenant)
            if tenant < len(order._orders):
                assert list(order._orders[tenant]) == model.cached(tenant)
        assert len(order) == len(list(order))
        assert [order.owner(block) for block in range(num_blocks)] == [model.owner.get(b) for b in range(num_blocks)]


# -- under a pool


class Cache:
    """A pool, and prompts of one word for each block that tenants read through it; each in a namespace of its own."""

    def __init__(self, num_blocks: int, share: float = 0.2) -> None:
        self.pool = BlockPool(num_blocks, 1, EvictionOrder(num_blocks, "slru", share))

    def hold(self, tenant: int, words: list[int]) -> NDArray[np.int32] | None:
        """The prompt's blocks, held; None, and nothing held, where they are not to be had."""
        pool, root = self.pool, root_digest("model", str(tenant), "")
        chunks = np.array(words, np.uint32).reshape(-1, 1)
        digests = chain_digests(root, chunks.tobytes(), 1)
        hits = ids(pool.match(root, digests, chunks))
        found = len(hits)
        if len(words) - found > pool.num_free_for(tenant, hits):
            return None
        pool.touch(hits)
        fresh = pool.allocate(len(words) - found, tenant=tenant)
        assert fresh is not None, "so many were free"
        if len(fresh):
            parent = digests[found - 1] if found else root
            pool.publish_chain(fresh, digests[found:], parent, chunks[found:], first=not found, media=False)
        return np.concatenate([hits, fresh])

    def read(self, tenant: int, words: list[int]) -> None:
        blocks = self.hold(tenant, words)
        assert blocks is not None
        self.pool.free(blocks)

    def footprint(self, tenant: int) -> int:
        assert self.pool.tenants is not None
        return self.pool.tenants.footprint(tenant)


def test_a_tenant_alone_may_use_everything() -> None:
    cache = Cache(10)
    cache.pool.set_tenants({}, {1: 4, 2: 3})
    cache.read(3, [*range(10)])
    assert cache.footprint(3) == 10
    # Tenants keep what they have up to their floors.
    cache.read(1, [*range(6)])
    assert (cache.footprint(3), cache.footprint(1)) == (4, 6)
    cache.read(3, [*range(100, 106)])
    assert (cache.footprint(3), cache.footprint(1)) == (6, 4)
    assert cache.hold(3, [*range(200, 207)]) is None
    assert cache.pool.num_free_for(3) == 6


def test_who_is_most_over_its_share_loses() -> None:
    """Weights 1, 1 and 2: with 40 blocks they are entitled to 10, 10 and 20, and as many they get."""
    cache = Cache(40)
    cache.pool.set_tenants({1: 1.0, 2: 1.0, 3: 2.0}, {})
    cache.read(1, [*range(40)])
    for turn in range(30):
        cache.read(3, [1000 * turn + word for word in range(5)])
        cache.read(2, [1000 * turn + word for word in range(5)])
    assert [cache.footprint(tenant) for tenant in (1, 2, 3)] == [10, 10, 20]


def test_a_tenant_grows_to_a_floor_above_its_share() -> None:
    """As long as others have any block above theirs; what it has beyond its floor it loses like everybody."""
    cache = Cache(40)
    cache.pool.set_tenants({}, {1: 25, 3: 8})
    cache.read(2, [*range(40)])
    cache.read(3, [*range(8)])
    for turn in range(10):
        cache.read(1, [1000 * turn + word for word in range(4)])
        cache.read(2, [1000 * turn + word for word in range(4)])
    assert [cache.footprint(tenant) for tenant in (1, 2, 3)] == [25, 7, 8]
    # Nobody has more than a floor beside it: its own blocks go.
    cache.pool.set_tenants({}, {1: 25, 2: 7, 3: 8})
    cache.read(1, [*range(5000, 5020)])
    assert [cache.footprint(tenant) for tenant in (1, 2, 3)] == [25, 7, 8]


def test_a_pool_is_shared_from_the_first_tenant_on() -> None:
    """Blocks from before are tenant 0's, in the order that they had."""
    cache = Cache(6, 0.5)
    cache.read(0, [1, 2, 3])
    cache.read(0, [1, 2, 3])
    held = cache.hold(0, [7])
    assert held is not None
    assert cache.pool.tenants is None
    order = [block for block in cache.pool._free if cache.pool.table.published[block]]
    blocks = cache.pool.allocate(2, tenant=4)
    assert cache.pool.tenants is not None
    assert blocks is not None
    assert (cache.footprint(0), cache.footprint(4)) == (4, 2)
    assert list(cache.pool._free) == order
    assert [cache.pool.tenants.owner(int(block)) for block in (blocks[0], held[0])] == [4, 0]
    assert cache.pool.tenants.owner(order[0]) == 0
    cache.pool.free(blocks)
    assert cache.pool.tenants.owner(int(blocks[0])) is None
    check_pool(cache.pool, [held.tolist()])


def test_a_hit_on_held_blocks_protects_them_before_any_was_freed() -> None:
    cache = Cache(20, 0.5)
    held = [cache.hold(1, [1, 2, 3, 4]) for _ in range(2)]
    for blocks in held:
        assert blocks is not None
        cache.pool.free(blocks)
    for begin in (100, 200):
        cache.read(1, [*range(begin, begin + 10)])
    root, words = root_digest("model", "1", ""), np.array([[1], [2]], np.uint32)
    assert len(cache.pool.match(root, chain_digests(root, words.tobytes(), 1), words)) == 1


def test_a_hit_protects_as_many_blocks_as_the_weights_of_now_allow() -> None:
    """An eighth of the tenant's part of 32: beside a weight of 3 that is 8 blocks, with a weight of 99 itself 31."""
    cache = Cache(40, 0.8)
    cache.read(1, [*range(8)])
    assert cache.hold(2, [*range(8)]) is not None
    for weights, proven in (({2: 3.0}, 1), ({1: 99.0}, 3)):
        cache.pool.set_tenants(weights, {})
        blocks = cache.hold(1, [*range(8)])
        assert blocks is not None
        assert cache.pool.tenants is not None
        assert np.flatnonzero(cache.pool.tenants._proven[blocks]).tolist() == [*range(proven)]


def test_what_follows_the_block_of_another_tenant_leaves_with_it() -> None:
    """In a namespace that both read, a floor keeps nothing behind what is not the tenant's own."""
    cache = Cache(6)
    pool = cache.pool
    pool.set_tenants({}, {2: 1})
    cache.read(1, [1, 2, 3, 4])
    root, words = root_digest("model", "1", ""), np.array([[1], [2], [3], [4], [5]], np.uint32)
    digests = chain_digests(root, words.tobytes(), 1)
    hits = ids(pool.match(root, digests[:4], words))
    pool.touch(hits)
    own = pool.allocate(1, tenant=2)
    assert own is not None
    pool.publish_chain(own, digests[4:], digests[3], words[4:], first=False, media=False)
    pool.free(np.concatenate([hits, own]))
    assert [cache.footprint(tenant) for tenant in (1, 2)] == [4, 1]
    assert pool.allocate(2, tenant=3) is not None
    assert [cache.footprint(tenant) for tenant in (1, 2, 3)] == [3, 0, 2]
    assert pool.num_free_for(3) == 4
    check_pool(pool, [[*map(int, np.flatnonzero(pool.ref_counts))]])


def test_over_the_floors_only_when_told_so() -> None:
    cache = Cache(6)
    cache.pool.set_tenants({}, {1: 4})
    cache.read(1, [1, 2, 3, 4])
    assert cache.pool.allocate(3, tenant=2) is None
    assert cache.pool.allocate(3, tenant=2, over_floors=True) is not None
    assert cache.footprint(1) == 3


def test_hits_on_what_a_floor_protects_cost_the_taker_nothing() -> None:
    """A pinned or hit block is held whoever holds it, and its owner's floor keeps so many less of the others."""
    cache = Cache(6)
    cache.pool.set_tenants({}, {1: 4})
    cache.read(1, [1, 2, 3, 4])
    chain = ids(sorted(cache.pool._free, key=lambda block: not cache.pool.table.published[block])[:2])
    assert cache.pool.num_free_for(2) == cache.pool.num_free_for(2, chain) == 2
    cache.pool.share(chain)
    assert cache.pool.num_free_for(2) == 2
    assert cache.pool.tenants is not None
    assert cache.pool.tenants.most_for(2, chain) == 2
    assert cache.pool.tenants.most_for(1, chain) == 4


@pytest.mark.parametrize(
    ("weights", "floors", "words"),
    [
        ({}, {0: 4, 2: 3}, "floors: 7 blocks together, the pool has 6"),
        ({1: 0.0}, {}, "weight of tenant 1: must be above 0, got 0.0"),
        ({1: float("inf")}, {}, "weight of tenant 1"),
        ({}, {1: -1}, "floor of tenant 1: must be 0 blocks or more, got -1"),
        ({-1: 1.0}, {}, "tenant -1: numbers begin at 0"),
        ({MAX_TENANT + 1: 1.0}, {}, "tenant 32768: numbers end at 32767"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    weights: dict[int, float], floors: dict[int, int], words: str
) -> None:
    pool = BlockPool(6, 1)
    pool.set_tenants({}, {1: 6})
    with pytest.raises(ValueError, match=words):
        pool.set_tenants(weights, floors)
    assert pool.tenants is not None
    assert [pool.tenants.floors_beside(tenant) for tenant in (0, 1, 40_000)] == [6, 0, 6]


@pytest.mark.parametrize("seed", range(8))
def test_no_tenant_falls_below_its_floor_by_the_traffic_of_others(seed: int) -> None:
    chance = random.Random(seed)
    cache = Cache(30, chance.choice([0.2, 0.6]))
    pool, refused = cache.pool, 0
    held: list[NDArray[np.int32]] = []
    floors: dict[int, int] = {}
    for turn in range(600):
        if turn % 100 == 0:
            floors = {tenant: chance.randrange(10) for tenant in range(3)}
            pool.set_tenants({tenant: chance.choice([0.5, 1.0, 4.0]) for tenant in range(5)}, floors)
        tenant = chance.randrange(5)
        before = [cache.footprint(other) for other in range(5)]
        if held and (len(held) == 4 or chance.random() < 0.4):
            pool.free(held.pop(chance.randrange(len(held))))
        else:
            free = pool.num_free_for(tenant)
            assert 0 <= free <= pool.num_free
            words = [chance.randrange(2) for _ in range(chance.randint(1, 9))]
            blocks = cache.hold(tenant, words)
            refused += blocks is None
            if blocks is not None:
                held.append(blocks)
            for other in range(5):
                if other != tenant:
                    assert cache.footprint(other) >= min(before[other], floors.get(other, 0))
        if turn % 97 == 0:
            pool.clear_prefix_table()
        check_pool(pool, [blocks.tolist() for blocks in held])
    assert pool.evictions > 100
    assert refused > 5


def test_a_thousand_tenants_cost_no_column_each() -> None:
    pool = BlockPool(20_000, 1)
    pool.set_tenants(dict.fromkeys(range(1000), 1.0), {})
    for number in range(1000):
        # Each has had the whole pool once.
        blocks = pool.allocate(200 if number % 100 else 20_000, tenant=number)
        assert blocks is not None
        pool.free(blocks)
    tenants = pool.tenants
    assert tenants is not None
    queues = [tenants._blank, *(queue for each in tenants._orders for queue in (each._probation, each._protected))]
    assert sum(queue._entries.nbytes for queue in queues) < 16 * 20_000 + 64 * len(queues)
