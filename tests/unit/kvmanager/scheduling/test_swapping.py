"""Preemption by swap and the host tier: what is copied when, what comes back from where, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.engine.scheduler_driver import Driver, moves, right
from support.engine.tables_alone import cache, drain, tables_of

from pagekv.kvmanager.engine.executor_wire import step_request
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import CopyKind, StepPlan
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

OUT, IN = CopyKind.SWAP_OUT, CopyKind.SWAP_IN


def started(driver: Driver, prompt: list[int], steps: int = 1, **fields: object) -> LiveRequest:
    """A request that has been computed for some steps."""
    request = driver.submit(prompt, **fields)  # type: ignore[arg-type]  # by name, of several types
    for _ in range(steps):
        driver.step()
    return request


def occupy(driver: Driver) -> None:
    """Makes the device forget: takes every free block as somebody else would, evicting what is cached."""
    blocks = driver.pool.allocate(driver.pool.num_free)
    assert blocks is not None
    driver.pool.free(blocks)
    driver.executor.slots.clear()


def test_a_preempted_sequence_comes_back_without_being_computed_again() -> None:
    """One copy a block each way, a partial tail included, and not one token computed twice."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", depth=1)
    request = started(driver, list(range(10)), steps=2, max_tokens=6)
    table = list(request.sequences[0].block_table)
    assert driver.executor.computed_tokens == 11
    driver.scheduler.preempt_all()
    # Given back at once: steps are ordered, so whoever gets these blocks writes them after they were copied.
    assert driver.pool.num_active == 0
    assert driver.host.num_held == 3
    driver.check()
    driver.plan()
    assert [source for source, _ in moves(driver, OUT)] == table
    driver.drain()
    # The full blocks were still cached on the device, where a hit comes first; the tail never is.
    assert len(moves(driver, IN)) == 1
    assert driver.executor.computed_tokens == 10 + 5
    assert right(request)
    assert driver.host.num_held == 0


def test_a_prompt_that_is_preempted_halfway_goes_on_where_it_was() -> None:
    """Six of fourteen tokens were computed; of the second block two slots are written, and no more are counted."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", max_batch_tokens=6, depth=1)
    request = started(driver, list(range(14)), steps=1, max_tokens=2)
    assert driver.executor.computed_tokens == 6
    driver.scheduler.preempt_all()
    driver.plan()
    assert driver.plans[-1].new[0].computed_tokens == 6
    driver.drain()
    assert driver.executor.computed_tokens == 14 + 1
    assert right(request)


def test_what_the_device_has_evicted_comes_from_the_host() -> None:
    driver = Driver(num_blocks=4, block_size=4, host_blocks=8, preemption="swap", depth=1)
    request = started(driver, list(range(10)), steps=3, max_tokens=5)
    driver.scheduler.preempt_all()
    other = driver.submit(list(range(50, 65)), max_tokens=2, priority=-1)
    driver.drain()
    assert right(request)
    assert right(other)
    assert len(moves(driver, IN)) == 3
    # 15 + 1 of the other one, 10 + 4 of this one: nothing twice.
    assert driver.executor.computed_tokens == 16 + 14
    assert request.sequences[0].preemptions == 1
    counters = driver.scheduler.counters
    assert (counters.preemptions, counters.swap_preemptions) == (1, 1)
    assert (counters.swapped_out, counters.swapped_in) == (3, 3)


def test_only_blocks_that_are_not_there_yet_are_copied() -> None:
    """Full blocks are known by their digests, so a second preemption copies what is new and the tail."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", depth=1)
    request = started(driver, list(range(8)), steps=2, max_tokens=12)
    driver.scheduler.preempt_all()
    driver.step()
    assert len(moves(driver, OUT)) == 3
    for _ in range(4):
        driver.step()
    driver.scheduler.preempt_all()
    driver.drain()
    # Two full blocks of 8 + 6 tokens were kept; the third has become full, and a fourth begun.
    assert len(moves(driver, OUT)) == 3 + 2
    assert right(request)


def test_blocks_that_others_hold_stay_where_they_are() -> None:
    """The victim finds them on the device when it returns: only what it held alone is copied."""
    driver = Driver(num_blocks=16, block_size=4, host_blocks=16, preemption="swap", depth=1)
    shared = list(range(8))
    first = started(driver, [*shared, 20, 21, 22, 23, 24], steps=2, max_tokens=8)
    second = started(driver, [*shared, 30, 31, 32, 33, 34], steps=2, max_tokens=8)
    (victim,) = second.sequences
    assert victim.cached_tokens == 8
    driver.scheduler.preemption.preempt(victim)
    assert victim.swapped is not None
    assert victim.swapped.blocks[:2] == [NO_BLOCK, NO_BLOCK]
    driver.drain()
    assert right(first)
    assert right(second)


def test_a_host_pool_that_is_full_means_recompute_and_never_an_error() -> None:
    driver = Driver(num_blocks=4, block_size=4, host_blocks=2, preemption="swap", depth=1)
    request = started(driver, list(range(10)), steps=2, max_tokens=5)
    driver.scheduler.preempt_all()
    assert driver.host.num_held == 2
    started(driver, list(range(50, 65)), max_tokens=2, priority=-1)
    driver.drain()
    assert right(request)
    # The two full blocks were kept, the tail was not: positions 8 to 10 again.
    assert len(moves(driver, IN)) == 2
    assert driver.executor.computed_tokens == 16 + 14 + 3


@pytest.mark.parametrize(("block_size", "swapped"), [(4, True), (2, False), (1, False)])
def test_auto_swaps_where_copying_takes_less_time_than_computing(block_size: int, swapped: bool) -> None:
    """A block takes a second out and one in, a token a second to compute; equal costs mean recompute."""
    driver = Driver(num_blocks=32, block_size=block_size, host_blocks=32, preemption="auto", depth=1)
    request = started(driver, list(range(8)), steps=1, max_tokens=5)
    driver.scheduler.preempt_all()
    assert (request.sequences[0].swapped is not None, driver.host.num_held > 0) == (swapped, swapped)
    driver.drain()
    assert (len(moves(driver, OUT)) > 0) == swapped
    assert right(request)


def test_without_a_host_pool_everything_is_recomputed() -> None:
    driver = Driver(num_blocks=4, block_size=4, preemption="swap", depth=1, prefix_cache=False)
    request = started(driver, list(range(10)), steps=2, max_tokens=5)
    driver.scheduler.preempt_all()
    driver.drain()
    assert right(request)
    assert moves(driver, OUT) == []
    assert driver.scheduler.counters.swap_preemptions == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_swapping_needs_no_prefix_cache(prefix_cache: bool) -> None:
    driver = Driver(num_blocks=4, block_size=4, host_blocks=4, preemption="swap", depth=1, prefix_cache=prefix_cache)
    request = started(driver, list(range(10)), steps=3, max_tokens=5)
    driver.scheduler.preempt_all()
    driver.submit(list(range(50, 65)), max_tokens=2, priority=-1)
    driver.drain()
    assert right(request)
    assert driver.executor.computed_tokens == 16 + 14
    assert driver.host.num_cached == (3 if prefix_cache else 0)


def test_another_request_hits_what_a_victim_left_in_the_host_pool() -> None:
    """The host pool is the prefix cache's second tier: cached tokens count, whichever tier they come from."""
    driver = Driver(num_blocks=4, block_size=4, host_blocks=8, preemption="swap", depth=1)
    victim = started(driver, list(range(12)), steps=2, max_tokens=5)
    driver.scheduler.preempt_all()
    driver.step()
    driver.abort(victim)
    occupy(driver)
    reader = driver.submit([*range(12), 5], max_tokens=3)
    stranger = driver.submit([*range(12), 5], max_tokens=3, identity=CacheIdentity(namespace="other"))
    driver.drain()
    assert reader.sequences[0].cached_tokens == 12
    assert stranger.sequences[0].cached_tokens == 0
    assert right(reader)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_blocks_that_a_reset_met_come_back_under_no_digest(num_blocks: int) -> None:
    driver = Driver(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", depth=1)
    victim = started(driver, list(range(4 * num_blocks + 1)), max_tokens=2)
    assert victim.sequences[0].num_published == num_blocks
    driver.scheduler.clear_prefix_cache()
    driver.scheduler.preempt_all()
    assert (driver.host.num_held, driver.host.num_cached) == (num_blocks + 1, 0)
    driver.drain()
    assert right(victim)


def test_what_a_victim_left_is_evicted_from_its_end() -> None:
    """A block without those before it can never be hit again."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=4, preemption="swap", depth=1)
    prompt = list(range(16))
    request = started(driver, prompt, max_tokens=2)
    digests = list(request.sequences[0].digests)
    driver.scheduler.preempt_all()
    driver.drain()
    assert [driver.host.lookup(digest) is not None for digest in digests] == [True] * 4
    started(driver, [50, 51, 52, 53, 54], max_tokens=2)
    driver.scheduler.preempt_all()
    assert [driver.host.lookup(digest) is not None for digest in digests] == [True, True, False, False]
    driver.drain()


@pytest.mark.parametrize("num_free", [0, 1, 3])
def test_write_back_fills_each_host_block_once(num_free: int) -> None:
    """The blocks evicted last stay, those in front of the prompt, and all are one operation."""
    pool, prompt = BlockPool(20, 2), list(range(40))
    tables = tables_of(pool, 4)
    tables.host.hold(range(num_free, 4))
    blocks = cache(pool, prompt)
    drain(tables)
    copies = tables.take_copies()
    assert [copy.source for copy in copies] == blocks[:num_free][::-1]
    assert sorted(copy.destination for copy in copies) == list(range(num_free))
    assert len(step_request(StepPlan(copies=copies), 1, 1, ()).memory_ops) == bool(num_free)


def test_write_back_keeps_what_the_device_evicts() -> None:
    driver = Driver(num_blocks=4, block_size=4, host_blocks=16, write_back=True, depth=1)
    first = started(driver, list(range(12)), max_tokens=2)
    driver.drain()
    for start in (30, 60):
        driver.submit(list(range(start, start + 15)), max_tokens=1)
        driver.drain()
    assert driver.scheduler.counters.written_back >= 3
    again = driver.submit(list(range(12)), max_tokens=2)
    driver.drain()
    assert again.sequences[0].cached_tokens == 8
    assert right(first)
    assert right(again)


def test_the_deepest_block_of_a_host_hit_is_evicted_first() -> None:
    """The others can still be hit; without the first block none of them could."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=3, preemption="swap", depth=1)
    prompt = list(range(14))
    victim = started(driver, prompt, max_tokens=3)
    driver.scheduler.preempt_all()
    driver.drain()
    occupy(driver)
    again = driver.submit(prompt, max_tokens=2)
    driver.drain()
    assert again.sequences[0].cached_tokens == 12
    assert len(moves(driver, IN)) == 3
    driver.host.keep([None], np.empty((0, 4), np.uint32), [])
    assert [driver.host.lookup(digest) is not None for digest in again.sequences[0].digests[:3]] == [True, True, False]
    assert right(victim)
    assert right(again)


def test_blocks_kept_for_a_sequence_are_evicted_before_hits_that_they_follow() -> None:
    """The first two of its blocks were held by another sequence, which has kept them in the host pool since."""
    driver = Driver(num_blocks=16, block_size=4, host_blocks=8, preemption="swap", depth=1)
    shared = list(range(8))
    first = started(driver, [*shared, 20, 21, 22, 23, 24], steps=2, max_tokens=8)
    second = started(driver, [*shared, 30, 31, 32, 33, 34], steps=2, max_tokens=8)
    (victim,) = second.sequences
    for request in (second, first):
        driver.scheduler.preemption.preempt(request.sequences[0])
    assert victim.swapped is not None
    assert victim.swapped.blocks[:2] == [NO_BLOCK, NO_BLOCK]
    _, _, third, tail = victim.swapped.blocks
    driver.abort(first)
    blocks = driver.pool.allocate(driver.pool.num_free)
    assert blocks is not None
    driver.pool.free(blocks)
    driver.plan()
    leading = [driver.host.lookup(digest) for digest in victim.digests[:2]]
    assert [source for source, _ in moves(driver, IN)] == [*leading, third, tail]
    assert list(driver.host._free)[-4:] == [tail, third, *leading[::-1]]
    driver.drain()
    assert right(second)


def test_a_collision_found_by_a_swap_raises_one_alarm() -> None:
    """The host pool has other tokens under the digest of a victim's block, which is then kept without a key."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=8, preemption="swap", depth=1)
    request = started(driver, list(range(10)), steps=2, max_tokens=6)
    (victim,) = request.sequences
    others, _ = driver.host.keep(victim.digests[:1], np.array([[9, 9, 9, 9]], np.uint32), [request.root])
    driver.host.release(others)
    driver.scheduler.preempt_all()
    assert victim.swapped is not None
    assert driver.host.key(victim.swapped.blocks[0]) is None
    assert driver.host.hash_alarms == 1
    driver.drain()
    assert right(request)


def test_a_lost_executor_takes_the_host_pool_with_it() -> None:
    """The epoch is over: nothing that was kept there is asked for again."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=8, preemption="swap")
    request = started(driver, list(range(10)), steps=2, max_tokens=5)
    driver.scheduler.preempt_all()
    driver.host.hash_alarms, driver.host.evictions = 2, 3
    driver.lose_executor()
    assert (driver.host.hash_alarms, driver.host.evictions) == (2, 3)  # counted since the manager started
    driver.check()
    driver.drain()
    assert right(request)
    assert moves(driver, IN) == []


@pytest.mark.parametrize(
    ("out", "back", "tokens", "swaps"),
    [(4, 4, 63, False), (4, 4, 65, True), (0, 4, 33, True), (0, 4, 31, False), (0, 0, 0, False)],
)
def test_auto_takes_what_costs_less(out: int, back: int, tokens: int, swaps: bool) -> None:
    """A block of 2 MB costs 2 ms each way at 1 GB/s, as much as 8 tokens of prefill at 4,000 a second."""
    policy = SwapPolicy("auto", 2_000_000, 10**9, 10**9, 4_000)
    assert policy.swaps(out, back, tokens) is swaps


@pytest.mark.parametrize(
    ("out", "back", "tokens", "swaps"), [(4, 0, 33, True), (4, 0, 31, False), (0, 4, 129, True), (0, 4, 127, False)]
)
def test_each_way_costs_what_it_was_measured_at(out: int, back: int, tokens: int, swaps: bool) -> None:
    """Out at 1 GB/s and in at a quarter of that: the way back costs four times as much."""
    policy = SwapPolicy("auto", 2_000_000, 10**9, 10**9 // 4, 4_000)
    assert policy.swaps(out, back, tokens) is swaps


def test_auto_recomputes_where_nothing_was_measured() -> None:
    assert not SwapPolicy("auto", 1, 0, 1, 1).swaps(1, 1, 10**6)
    assert SwapPolicy("swap").swaps(1, 1, 1)
    assert not SwapPolicy("recompute", 1, 10**9, 10**9, 1).swaps(1, 1, 10**6)


# -- what it would cost


def swap_cost(driver: Driver, request: LiveRequest) -> tuple[int, int, int]:
    """Cost of all sequences of a request that hold blocks, as for `auto`: published first."""
    group = [s for s in request.sequences if s.state is SeqStatus.RUNNING]
    tables = driver.scheduler._tables
    for sequence in group:
        tables.publisher.publish(sequence)
    return tables.swapper.cost(group)


def held_by_others(driver: Driver) -> LiveRequest:
    """Another request holds two of four blocks, 13 positions."""
    started(driver, [*range(8), 20, 21, 22, 23, 24], max_tokens=8)
    return started(driver, [*range(8), 30, 31, 32, 33, 34], max_tokens=8)


def kept_already(driver: Driver) -> LiveRequest:
    """The host pool has three of four blocks, 15 positions."""
    request = started(driver, list(range(12)), steps=2, max_tokens=8)
    driver.scheduler.preempt_all()
    driver.pool.clear_prefix_table()
    driver.step()
    driver.step()
    return request


def shared_in_the_group(driver: Driver) -> LiveRequest:
    """Three sequences share eight blocks, and each has one of its own."""
    request = driver.submit(list(range(33)), max_tokens=3, n=3)
    while any(s.state is not SeqStatus.RUNNING for s in request.sequences):
        driver.step()
    return request


@pytest.mark.parametrize(
    ("given", "cost", "block_bytes", "swaps"),
    [
        # With all four blocks, 13 positions, it would be 11.2 s against 13 s.
        (held_by_others, (2, 2, 5), 14, False),
        # With a copy of each of the four it would be 20 s.
        (kept_already, (1, 4, 15), 25, True),
        # Counted for each of the three they would be 27 blocks and 100 positions.
        (shared_in_the_group, (11, 11, 36), 17, False),
    ],
)
def test_only_what_would_really_move_counts(
    given: Callable[[Driver], LiveRequest], cost: tuple[int, int, int], block_bytes: int, swaps: bool
) -> None:
    """A block takes `block_bytes` / 10 seconds each way, a token one; the decision hangs on it."""
    driver = Driver(num_blocks=32, block_size=4, host_blocks=32, preemption="swap", depth=1)
    request = given(driver)
    assert swap_cost(driver, request) == cost
    tables = driver.scheduler._tables
    tables.limits = replace(tables.limits, swap=SwapPolicy("auto", block_bytes, 10, 10, 1))
    driver.scheduler.preemption.preempt(request.sequences[0])
    assert (request.sequences[0].swapped is not None) is swaps
    driver.drain()
