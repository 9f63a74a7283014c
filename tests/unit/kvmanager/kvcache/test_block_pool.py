"""The device pool: holders, the free queue, eviction and what they do to the prefix table."""

import numpy as np
import pytest
from numpy.typing import NDArray
from support.engine.arrays import ids
from support.engine.integrity import check_pool

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder

ROOT = root_digest("model", "", "")


def rows_of(tokens: list[int], block_size: int) -> NDArray[np.uint32]:
    full = len(tokens) // block_size * block_size
    return np.array(tokens[:full], np.uint32).reshape(-1, block_size)


def publish(pool: BlockPool, blocks: list[int], tokens: list[int]) -> list[bytes]:
    """Publishes the full blocks of `tokens` in `blocks`; returns their digests."""
    digests = chain_digests(ROOT, token_bytes(tokens), pool.block_size)
    # Blocks that are in the table already would be offered again, which the scheduler never does.
    begin = next((i for i in range(len(digests)) if pool.table.digest(blocks[i]) is None), len(digests))
    if begin < len(digests):
        parent = digests[begin - 1] if begin else ROOT
        rows = rows_of(tokens, pool.block_size)[begin:]
        pool.publish_chain(
            ids(blocks[begin : len(digests)]), digests[begin:], parent, rows, first=not begin, media=False
        )
    return digests


def held(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return list(map(int, blocks))


def match(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Both ways to find cached blocks, which must agree."""
    digests = chain_digests(ROOT, token_bytes(tokens), pool.block_size)
    rows = rows_of(tokens, pool.block_size)
    found = pool.match(ROOT, digests, rows)
    assert pool.table.trie.match(ROOT, rows) == found
    return found


def test_allocate_takes_all_or_nothing() -> None:
    pool = BlockPool(4, 2)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert held(pool, 3) == [0, 1, 2]
    assert pool.num_active == 3
    check_pool(pool, [[0, 1, 2]])


def test_a_content_that_somebody_holds_is_never_evicted() -> None:
    """The duplicate has the entry once the first copy is let go, and the memory of that one is free for anything."""
    pool = BlockPool(4, 1)
    first, second = held(pool, 2), held(pool, 2)
    for blocks in (first, second):
        publish(pool, blocks, [5, 6])
    pool.free(ids(first))
    assert match(pool, [5, 6]) == second
    assert held(pool, 2) == first[::-1]
    assert (match(pool, [5, 6]), pool.evictions) == (second, 0)
    check_pool(pool, [first, second])
    pool.free(ids(second))
    assert match(pool, [5, 6]) == second
    check_pool(pool, [first])


@pytest.mark.parametrize("held_first", [True, False])
def test_a_copy_that_takes_an_entry_over_is_as_proven_as_the_block_before(held_first: bool) -> None:
    """Else what follows would be protected and its prefix not: the front of the chain would be evicted first."""
    pool = BlockPool(10, 1, EvictionOrder(10, "slru", 0.5))
    chain = held(pool, 2)
    publish(pool, chain, [5, 6])
    pool.free(ids(chain))
    pool.touch(ids(chain[:1]))
    copy = held(pool, 1)
    if held_first:
        publish(pool, copy, [5])
        pool.free(ids(chain[:1]))
    else:
        pool.free(ids(chain[:1]))
        publish(pool, copy, [5])
    pool.free(ids(copy))
    check_pool(pool, [])
    assert match(pool, [5, 6]) == [*copy, chain[1]]
    assert list(pool._free)[-1] == copy[0]


def test_clear_forgets_and_keeps_what_is_held() -> None:
    pool = BlockPool(3, 1)
    blocks = held(pool, 2)
    publish(pool, blocks, [1, 2])
    pool.free(ids(blocks[1:]))
    assert pool.clear_prefix_table() == 2
    assert match(pool, [1, 2]) == []
    assert pool.num_active == 1
    check_pool(pool, [blocks[:1]])


def test_a_block_tells_for_how_long_its_content_is_cached() -> None:
    now = 100.0
    pool = BlockPool(6, 2, clock=lambda: now)
    first = held(pool, 2)
    assert pool.table.age_s(first[0]) is None
    publish(pool, first, [1, 2, 3, 4])
    now = 103.0
    publish(pool, [*first, *(rest := held(pool, 1))], [1, 2, 3, 4, 5, 6])
    assert [pool.table.age_s(block) for block in [*first, *rest]] == [3.0, 3.0, 0.0]
    # Another copy takes over the entry: its content is cached for as long as before.
    pool.free(ids([*first, *rest]))
    now = 110.0
    copies = held(pool, 2)
    publish(pool, copies, [1, 2, 3, 4])
    assert [pool.table.age_s(block) for block in [*first, *copies]] == [None, None, 10.0, 10.0]
    pool.clear_prefix_table()
    assert pool.table.age_s(copies[0]) is None
    publish(pool, copies, [1, 2, 3, 4])
    assert pool.table.age_s(copies[0]) == 0.0


def test_without_a_clock_blocks_have_no_age() -> None:
    pool = BlockPool(4, 2)
    blocks = held(pool, 1)
    publish(pool, blocks, [1, 2])
    assert pool.table.age_s(blocks[0]) is None


def test_evicted_blocks_are_shown_while_the_table_still_has_them() -> None:
    pool = BlockPool(3, 2)
    blocks = held(pool, 2)
    digests = publish(pool, blocks, [1, 2, 3, 4])
    pool.free(ids(blocks))
    shown: list[list[bytes]] = []
    pool.allocate(2, lambda evicted: shown.append(pool.table.digests(evicted.tolist())))
    assert shown == [digests[1:]]
    assert pool.allocate(2, lambda evicted: shown.append([])) is None
    assert len(shown) == 1


def test_misuse_is_a_broken_invariant() -> None:
    pool = BlockPool(2, 1)
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.free(ids([0]))
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.publish_chain(ids([0]), [b"x" * 32], ROOT, rows_of([1], 1), first=True, media=False)
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.publish_one_each([0], [b"x" * 32], [ROOT], [ROOT], rows_of([1], 1))


@pytest.mark.parametrize("damage", ["ref", "table"])
def test_check_pool_sees_damage(damage: str) -> None:
    pool = BlockPool(3, 1)
    blocks = held(pool, 1)
    publish(pool, blocks, [1])
    check_pool(pool, [blocks])
    if damage == "ref":
        pool.ref_counts[2] = 1
    else:
        pool.table._block_of[b"stray"] = 2
    with pytest.raises(InvariantError):
        check_pool(pool, [blocks])
