"""Pins: leases on cached prefixes."""

from __future__ import annotations

import random

import pytest
from support.clock import Clock
from support.engine.cached_prefixes import cache, evict_all
from support.engine.integrity import check_pool, pin_tables

from pagekv.common.errors import AlreadyExists, LimitExceeded
from pagekv.kvmanager.kvcache import pins as pins_module
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.pins import Pins

SIZE = 4


def pool_and_pins(num_blocks: int = 20, share: float = 0.5) -> tuple[BlockPool, Pins, Clock]:
    pool, clock = BlockPool(num_blocks, SIZE), Clock()
    return pool, Pins(pool, share, clock), clock


def test_a_pinned_prefix_survives_pressure_and_goes_when_its_pin_does() -> None:
    pool, pins, _ = pool_and_pins()
    pinned, other = cache(pool, [1] * 12), cache(pool, [2] * 12)
    pin_id = pins.pin(pinned, 60, 0).pin_id
    assert (len(pins), pins.num_blocks, pool.num_active, pool.num_cached_free) == (1, 3, 3, 3)
    evict_all(pool)
    assert [pool.table.digest(block) is not None for block in pinned + other] == [True] * 3 + [False] * 3
    assert pins.unpin(pin_id) == 3
    assert (len(pins), pins.num_blocks, pool.num_active, pool.num_cached_free) == (0, 0, 0, 3)
    evict_all(pool)
    assert pool.num_published == 0


def test_every_pin_that_begins_or_ends_is_reported_with_its_blocks() -> None:
    pool, clock = BlockPool(20, SIZE), Clock()
    seen: list[tuple[str, list[int]]] = []
    pins = Pins(
        pool,
        0.5,
        clock,
        pinned=lambda blocks: seen.append(("pinned", blocks.tolist())),
        unpinned=lambda blocks: seen.append(("unpinned", blocks.tolist())),
    )
    long, short = cache(pool, [1] * 12), cache(pool, [2] * 4)
    with pytest.raises(LimitExceeded):
        pins.pin(long, 60, largest_need=18)
    pins.pin(long, 10, 0)
    pins.pin(short, 60, 0)
    clock.now += 10
    pins.expire()
    pins.end_all()
    pins.end_all()
    assert seen == [("pinned", long), ("pinned", short), ("unpinned", long), ("unpinned", short)]


def test_unpinning_again_or_what_never_was_is_no_error() -> None:
    pool, pins, _ = pool_and_pins()
    pin_id = pins.pin(cache(pool, [1] * 4), 60, 0).pin_id
    assert [pins.unpin(pin_id), pins.unpin(pin_id), pins.unpin("pin-0")] == [1, 0, 0]


def test_pins_that_share_blocks_count_them_once() -> None:
    pool, pins, _ = pool_and_pins()
    long, short = cache(pool, [1] * 12), cache(pool, [1] * 8)
    first, second = pins.pin(long, 60, 0).pin_id, pins.pin(short, 60, 0).pin_id
    assert pins.num_blocks == 3
    assert pins.holders[long].tolist() == [2, 2, 1]
    assert [pool.ref_count(block) for block in long] == [2, 2, 1]
    pins.unpin(first)
    assert pins.holders[long].tolist() == [1, 1, 0]
    assert pins.num_blocks == 2
    pins.unpin(second)
    assert pins.num_blocks == 0


def test_leases_end_in_their_order() -> None:
    pool, pins, clock = pool_and_pins()
    blocks = cache(pool, [1] * 4)
    assert pins.next_expiry is None
    for lease in (30, 10, 20):
        pins.pin(blocks, lease, 0)
    assert pins.next_expiry == 110
    clock.now = 109.9
    assert pins.expire() == 0
    clock.now = 110
    assert pins.expire() == 1
    assert pins.next_expiry == 120
    clock.now = 500
    assert pins.expire() == 2
    assert (pins.next_expiry, pool.num_active) == (None, 0)


def test_pinned_blocks_are_limited_to_a_share_of_the_pool() -> None:
    pool, pins, _ = pool_and_pins(share=0.25)
    first, second = cache(pool, [1] * 12), cache(pool, [2] * 12)
    pins.pin(first, 60, 0)
    message = r"with this prefix 6 blocks would be pinned; at most 5 of 20 may be \(--max-pinned-share 0.25\)"
    with pytest.raises(LimitExceeded, match=message) as caught:
        pins.pin(second, 60, 0)
    facts = {"needed_blocks": "3", "available_blocks": "2", "pinned_blocks": "3", "limit": "5"}
    assert caught.value.metadata == {**facts, "flag": "--max-pinned-share"}
    assert (len(pins), pins.num_blocks, pool.num_active) == (1, 3, 3)
    pins.pin(second[:2], 60, 0)
    # Blocks that are pinned already take nothing more.
    pins.pin(first, 60, 0)
    assert pins.num_blocks == 5


def test_a_live_request_keeps_the_blocks_that_it_may_still_need() -> None:
    pool, pins, _ = pool_and_pins()
    blocks = cache(pool, [1] * 20)
    with pytest.raises(LimitExceeded, match="5 of 20 blocks would be pinned, and a live request may need 16") as caught:
        pins.pin(blocks, 60, largest_need=16)
    assert caught.value.metadata == {"needed_blocks": "5", "available_blocks": "4", "pinned_blocks": "0"}
    assert pool.num_active == 0
    pins.pin(blocks, 60, largest_need=15)


def test_the_number_of_pins_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "MAX_PINS", 3)
    pool, pins, _ = pool_and_pins()
    blocks = cache(pool, [1] * 4)
    for _ in range(3):
        pins.pin(blocks, 60, 0)
    with pytest.raises(LimitExceeded, match="there are 3 pins"):
        pins.pin(blocks, 60, 0)


def test_a_pin_of_the_same_id_renews_and_holds_the_new_blocks_instead() -> None:
    pool, pins, clock = pool_and_pins(share=0.25)
    first, second = cache(pool, [1] * 16), cache(pool, [1] * 8 + [2] * 12)
    assert pins.pin(first, 10, 0, "mine", CacheIdentity("n", "a")).expires_at == 110
    clock.now = 105
    # Two of its five blocks are held already, and two others are let go: 4 + 3 - 2 are the 5 that may be pinned.
    lease = pins.pin(second, 10, 0, "mine", CacheIdentity("n", "a"))
    assert pins.leases() == [lease]
    assert (lease.blocks.tolist(), lease.expires_at, lease.identity.namespace) == (second, 115, "n")
    assert (len(pins), pins.num_blocks, pool.num_active) == (1, 5, 5)
    assert [pool.ref_count(block) for block in first] == [1, 1, 0, 0]


@pytest.mark.parametrize("other", [CacheIdentity(), CacheIdentity("m", "a"), CacheIdentity("n", "b")])
def test_an_id_is_that_of_one_namespace_and_adapter(other: CacheIdentity) -> None:
    pool, pins, _ = pool_and_pins()
    first, second = cache(pool, [1] * 8), cache(pool, [2] * 8)
    before = pins.pin(first, 10, 0, "mine", CacheIdentity("n", "a"))
    with pytest.raises(AlreadyExists, match=r"pin_id: must not be that of a pin in another namespace .* got 'mine'"):
        pins.pin(second, 10, 0, "mine", other)
    assert (pins.leases(), pins.num_blocks) == ([before], 2)


def test_a_renewal_that_fails_leaves_the_pin_as_it_was() -> None:
    pool, pins, clock = pool_and_pins(share=0.25)
    first, second = cache(pool, [1] * 8), cache(pool, [2] * 24)
    before = pins.pin(first, 10, 0, "mine")
    clock.now += 5
    with pytest.raises(LimitExceeded, match="with this prefix 6 blocks would be pinned; at most 5 of 20") as caught:
        pins.pin(second, 10, 0, "mine")
    assert caught.value.metadata == {
        "needed_blocks": "6", "available_blocks": "5", "pinned_blocks": "2", "limit": "5", "flag": "--max-pinned-share"
    }  # fmt: skip  # one fact a line would fill a screen
    with pytest.raises(LimitExceeded, match="a live request may need 17"):
        pins.pin(second[:4], 10, 17, "mine")
    assert pins.leases() == [before]
    assert (pins.num_blocks, pool.num_active) == (2, 2)


def test_repeating_a_pin_changes_its_lease_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are as many pins as there can be, and where the share is used up."""
    monkeypatch.setattr(pins_module, "MAX_PINS", 1)
    pool, pins, clock = pool_and_pins(share=0.25)
    blocks = cache(pool, [1] * 20)
    for now in (100.0, 103.0):
        clock.now = now
        assert pins.pin(blocks, 10, 15, "mine").expires_at == now + 10
    assert (len(pins), pins.num_blocks) == (1, 5)
    assert pins.holders[blocks].tolist() == [1] * 5


@pytest.mark.parametrize("seed", range(10))
def test_random_pins_keep_every_count_right(seed: int) -> None:
    rng = random.Random(seed)
    pool, pins, clock = pool_and_pins(30)
    held: list[str] = []
    for _ in range(200):
        move = rng.random()
        if move < 0.5:
            blocks = cache(pool, [rng.randrange(2) for _ in range(rng.randrange(4, 20))])
            try:
                renewed = rng.choice(held) if held and rng.random() < 0.5 else ""
                held.append(pins.pin(blocks, rng.randrange(1, 50), rng.randrange(30), renewed).pin_id)
            except LimitExceeded:
                assert pins.num_blocks <= 15
        elif move < 0.7 and held:
            pins.unpin(rng.choice(held))
        elif move < 0.95:
            clock.now += rng.randrange(5)
            pins.expire()
        elif move < 0.98:
            evict_all(pool)
        else:
            assert pins.end_all() >= 0
            assert len(pins) == 0
        check_pool(pool, pin_tables(pins))
        assert pins.num_blocks == pool.num_active
        assert pins.num_blocks == len({block for table in pin_tables(pins) for block in table})
    assert all(expiry > clock.now for expiry in [pins.next_expiry] if expiry is not None)


def test_tenants_have_pins_of_the_same_id_and_know_only_their_own() -> None:
    pool, pins, _ = pool_and_pins()
    first, second = cache(pool, [1] * 12), cache(pool, [2] * 4)
    one = pins.pin(first, 60, 0, "same", CacheIdentity(tenant="one"), "one")
    # Of another namespace, which says nothing of the other's.
    two = pins.pin(second, 30, 0, "same", CacheIdentity("shared"), "two")
    assert (pins.leases("one"), pins.leases("two"), pins.leases("three"), pins.leases()) == (
        [one],
        [two],
        [],
        [two, one],
    )
    assert pins.unpin("same", "three") == 0
    assert pins.unpin("same", "two") == 1
    assert (pins.leases(), pins.num_blocks) == ([one], 3)
    again = pins.pin(second, 30, 0, "same", CacheIdentity("shared"), "two")
    with pytest.raises(AlreadyExists):
        pins.pin(second, 30, 0, "same", CacheIdentity("elsewhere"), "two")
    assert pins.leases() == [again, one]
    # A caller that sees all ends all of the id.
    assert pins.unpin("same") == 4
    assert (len(pins), pins.num_blocks, pool.num_active) == (0, 0, 0)
