"""Statistics of pool and scheduler at moments of a history."""

from __future__ import annotations

import pytest
from support.engine.scheduler_driver import Driver
from support.engine.states import state_of

from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.v1 import operator_service_pb2 as pb


def statistics(driver: Driver) -> EngineStatistics:
    return EngineStatistics(state_of(driver, CacheAdmin(True, 0.5, lambda: None)))


def stats(driver: Driver) -> pb.GetStatsResponse:
    return statistics(driver).stats()


def test_gauges_follow_the_blocks() -> None:
    """Usage counts held blocks, utilization their filled slots; blocks of a request that ended are free and cached."""
    driver = Driver(num_blocks=8, block_size=4, depth=1)
    empty = stats(driver)
    assert (empty.block_size, empty.num_device_blocks) == (4, 8)
    assert (empty.kv_usage, empty.utilization, empty.free_blocks, empty.cached_free_blocks) == (0.0, 1.0, 8, 0)
    driver.submit([1, 2, 3, 4, 5, 6], max_tokens=2)
    driver.submit([7] * 40, max_tokens=1)
    driver.plan()
    running = stats(driver)
    assert (running.kv_usage, running.utilization) == (0.25, 0.75)
    assert (running.active_blocks, running.free_blocks, running.published_blocks) == (2, 6, 1)
    assert (running.num_device_blocks, running.cached_free_blocks) == (8, 0)
    assert (running.running_sequences, running.waiting_sequences) == (1, 1)
    driver.complete()
    driver.abort(driver.requests[1])
    driver.drain()
    left = stats(driver)
    assert (left.kv_usage, left.free_blocks, left.cached_free_blocks, left.published_blocks) == (0.0, 8, 1, 1)
    assert (left.prompt_tokens_total, left.cached_tokens_total, left.generated_tokens_total) == (6, 0, 2)


def test_the_host_pool_is_told_apart_from_the_device() -> None:
    """A request of eight tokens and one sampled holds three host blocks while it is swapped out, two of them full."""
    driver = Driver(num_blocks=8, block_size=4, host_blocks=5, preemption="swap", depth=1)
    driver.submit([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=4)
    driver.step()
    driver.step()
    assert (stats(driver).num_host_blocks, stats(driver).host_held_blocks) == (5, 0)
    driver.scheduler.preempt_all()
    out = stats(driver)
    assert (out.num_device_blocks, out.num_host_blocks, out.active_blocks) == (8, 5, 0)
    assert (out.host_held_blocks, out.host_cached_blocks, out.swapped_out_blocks_total) == (3, 2, 3)
    driver.drain()
    back = stats(driver)
    assert (back.num_host_blocks, back.host_held_blocks, back.host_cached_blocks) == (5, 0, 2)


def test_usage_stays_between_0_and_1_and_hits_count_tokens_of_prompts() -> None:
    """Also where requests preempt each other."""
    driver = Driver(num_blocks=6, block_size=2)
    for number in range(12):
        driver.submit([1, 2, 3, 4, number], max_tokens=4)
    seen = []
    while driver.step():
        seen.append(stats(driver))
        assert 0.0 <= seen[-1].kv_usage <= 1.0
        assert 0.0 <= seen[-1].utilization <= 1.0
        assert seen[-1].free_blocks + seen[-1].active_blocks == 6
    assert max(moment.kv_usage for moment in seen) == 1.0
    last = seen[-1]
    assert last.preemptions_total > 0
    assert last.prompt_tokens_total == 12 * 5
    assert last.cached_tokens_total == sum(r.sequences[0].cached_tokens or 0 for r in driver.requests) > 0
    assert last.prefix_hit_rate == pytest.approx(last.cached_tokens_total / 60)


def test_more_may_be_promised_than_there_is() -> None:
    """Blocks at their longest, the last token's left out: (6 + 27 - 1) / 4 and (3 + 6 - 1) / 4 in a pool of 8."""
    driver = Driver(num_blocks=8, block_size=4, depth=1)
    found = statistics(driver)
    assert found.promised_blocks() == 0
    driver.submit([1, 2, 3, 4, 5, 6], max_tokens=27)
    driver.submit([7, 8, 9], max_tokens=6)
    assert found.promised_blocks() == 0
    driver.plan()
    assert found.promised_blocks() == 8 + 2 > driver.pool.num_blocks
    assert found.ref_counts().tolist().count(1) == 3
