"""Which blocks go first when memory is short: golden values, driven through the scheduler under both policies.
Segmented LRU goes its own way only where its share holds a block that was hit; elsewhere its order is that of LRU.
"""

from __future__ import annotations

import pytest
from support.engine.scheduler_driver import Driver, expect, finished, output

from pagekv.kvmanager.kvcache.block_hash import chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.eviction_policy import DEFAULT_POLICY, DEFAULT_PROTECTED_SHARE
from pagekv.kvmanager.scheduling.sequence import LiveRequest

# Of the pool, protected by segmented LRU; None: LRU.
Share = float | None


@pytest.fixture(params=[None, DEFAULT_PROTECTED_SHARE], ids=["lru", DEFAULT_POLICY])
def share(request: pytest.FixtureRequest) -> Share:
    found: Share = request.param
    return found


def serve(driver: Driver, prompt: list[int], max_tokens: int = 1) -> LiveRequest:
    """Runs a request to its end; its output must be right."""
    request = driver.submit(prompt, max_tokens)
    driver.drain()
    assert output(request) == expect(prompt, max_tokens)
    return request


def cached_of(driver: Driver, prompt: list[int]) -> int:
    """Leading tokens of a prompt that are cached now; looking changes nothing."""
    digests = chain_digests(root_digest("model", "", ""), token_bytes(prompt), driver.block_size)
    found = [driver.pool.table.lookup(digest) is not None for digest in digests]
    return driver.block_size * [*found, False].index(False)


def worked_example(share: Share) -> Driver:
    """vLLM's example (docs/design/prefix_caching.md): ten blocks of four after two requests that shared two of them.

    The first has 15 tokens of prompt and fills a fourth block and the first slot of a fifth; the second, which arrives
    then, has 14 tokens and shares ten. The first ends first.
    """
    driver = Driver(num_blocks=10, block_size=4, depth=1, protected_share=share)
    first = driver.submit(list(range(1, 16)), max_tokens=3)
    driver.step()
    assert list(first.sequences[0].block_table) == [0, 1, 2, 3]
    driver.step()
    second = driver.submit([*range(1, 11), 90, 91, 92, 93], max_tokens=3)
    driver.plan()
    assert list(first.sequences[0].block_table) == [0, 1, 2, 3, 4]
    assert list(second.sequences[0].block_table) == [0, 1, 5, 6]
    assert second.sequences[0].cached_tokens == 8
    driver.complete()
    assert (finished(first), finished(second)) == (True, False)
    assert driver.pool.num_free == 10 - 4
    driver.drain()
    return driver


def test_blocks_go_in_the_order_of_the_worked_example(share: Share) -> None:
    """After both have ended the free queue is 7-8-9-4-3-2-6-5-1-0."""
    driver = worked_example(share)
    request = driver.submit([80] * 40)
    driver.plan()
    assert list(request.sequences[0].block_table) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]


def test_hits_leave_the_queue_before_anything_is_taken_from_it(share: Share) -> None:
    """29 tokens that share twelve touch 0, 1 and 2 and take 7, 8, 9, 4 and 3, of which only 3 is
    cached; 6 and 5 are what is left.
    """
    driver = worked_example(share)
    request = driver.submit([*range(1, 13), *range(70, 87)], max_tokens=9)
    driver.plan()
    assert list(request.sequences[0].block_table) == [0, 1, 2, 7, 8, 9, 4, 3]
    assert driver.pool.evictions == 1
    driver.drain()
    grown = [block for plan in driver.plans for block in plan.append_blocks]
    assert grown[-2:] == [6, 5]
    assert output(request) == expect([*range(1, 13), *range(70, 87)], 9)


def test_nothing_is_evicted_while_blocks_were_never_used(share: Share) -> None:
    """Cached blocks stay while there is anything else, and go one by one when there is not."""
    driver = Driver(num_blocks=12, block_size=4, protected_share=share)
    for number in range(3):
        serve(driver, [number] * 16)
        assert driver.pool.evictions == 0
    assert driver.pool.num_published == 12
    serve(driver, [9] * 4)
    assert driver.pool.evictions == 1
    assert driver.pool.num_published == 12


def test_the_oldest_that_nobody_holds_goes_first(share: Share) -> None:
    """A was used 10 seconds ago, B 3, C 1; D 15 seconds ago, but it is held. A goes."""
    driver = Driver(num_blocks=8, block_size=4, depth=1, protected_share=share)
    d = driver.submit([4] * 4, max_tokens=9)
    driver.step()
    a, b, c = [1] * 4, [2] * 4, [3] * 4
    for prompt in (a, b, c):
        driver.submit(prompt, max_tokens=1)
        driver.step()
    assert driver.pool.num_cached_free == 3
    # D has taken its second block by now, and of the eight three were never used.
    taken = driver.submit([9] * 13, max_tokens=1)
    driver.step()
    assert finished(taken)
    assert driver.pool.evictions == 1
    assert not finished(d)
    assert [cached_of(driver, prompt) for prompt in (a, b, c)] == [0, 4, 4]
    driver.drain()
    assert output(d) == expect([4] * 4, 9)


def test_using_a_prefix_again_makes_it_the_youngest(share: Share) -> None:
    """Recency is the place in the queue, and a hit gives a new one."""
    driver = Driver(num_blocks=4, block_size=4, protected_share=share)
    a, b = [1] * 4, [2] * 4
    serve(driver, a)
    serve(driver, b)
    serve(driver, [*a, 5])
    serve(driver, [9] * 12)
    assert [cached_of(driver, a), cached_of(driver, b)] == [4, 0]


def test_a_prefix_that_was_hit_outlives_a_younger_one_where_it_is_protected(share: Share) -> None:
    """Nine of ten blocks are taken: LRU leaves the youngest, segmented LRU the one that was hit."""
    driver = Driver(num_blocks=10, block_size=4, protected_share=share)
    hit, younger = [1] * 4, [2] * 4
    serve(driver, hit)
    serve(driver, [*hit, 5])
    serve(driver, younger)
    serve(driver, [9] * 36)
    assert [cached_of(driver, hit), cached_of(driver, younger)] == ([0, 4] if share is None else [4, 0])


@pytest.mark.parametrize("short", range(1, 4))
def test_a_chain_loses_its_deepest_blocks_first(short: int, share: Share) -> None:
    """At equal age the tail goes first, so what is left of a prompt is always its beginning."""
    driver = Driver(num_blocks=4, block_size=4, protected_share=share)
    chain = [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    serve(driver, chain)
    serve(driver, [9] * (4 * short))
    assert driver.pool.evictions == short
    assert cached_of(driver, chain) == 16 - 4 * short


def test_an_evicted_block_is_found_no_more(share: Share) -> None:
    """The entry is gone with the memory; until then nothing of a request that ended is dropped."""
    driver = Driver(num_blocks=3, block_size=4, protected_share=share)
    serve(driver, [1] * 8)
    assert (driver.pool.num_active, driver.pool.num_cached_free, driver.pool.num_published) == (0, 2, 2)
    serve(driver, [2] * 12)
    assert (driver.pool.num_active, driver.pool.num_cached_free, driver.pool.num_published) == (0, 3, 3)
    assert driver.pool.evictions == 2
    assert cached_of(driver, [1] * 8) == 0


def test_with_everything_held_a_request_gives_way_as_a_whole(share: Share) -> None:
    """Blocks of running requests are never taken one by one."""
    driver = Driver(num_blocks=6, block_size=4, depth=1, protected_share=share)
    requests = [driver.submit([token] * 8, max_tokens=8) for token in (1, 2, 3)]
    driver.step()
    assert (driver.pool.num_free, driver.pool.num_cached_free) == (0, 0)
    driver.step()
    # The last one's two blocks are what the other two need now.
    assert [request.sequences[0].preemptions for request in requests] == [0, 0, 1]
    assert [len(request.sequences[0].block_table) for request in requests] == [3, 3, 0]
    driver.drain()
    for token, request in zip((1, 2, 3), requests, strict=True):
        assert output(request) == expect([token] * 8, 8)
