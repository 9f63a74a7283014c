"""Queries to a serving engine: pins, resets, watches, lookups and explanations."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from support.engine.engine_harness import Bench, Link, command, config, expect, identified, read, run, until
from support.engine.integrity import check_engine
from support.event_loop import in_event_loop, run_by

from pagekv.common.errors import AlreadyExists, Draining, LimitExceeded, Unavailable
from pagekv.kvmanager.engine import loop as engine_loop
from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.live_requests import LiveRequests
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.observer import Observer
from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, chain_digests, root_digest, token_bytes
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.v1 import cache_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb

ANY = CacheIdentity()
EIGHT = [*range(8)]


async def outcomes(
    engine: EngineLoop, prompt: list[int], identity: CacheIdentity = ANY
) -> list[pb.BlockOutcome.ValueType]:
    return [block.outcome for block in (await engine.queries.explain_prefix(prompt, identity, 99)).blocks]


def followed(watch: TableWatch) -> set[bytes]:
    """The digests on the device that a reader of the watch has by now."""
    found = {digest for stored in watch.take_snapshot(9999) for digest in stored.digests}
    diff = watch.take_unread()
    if diff.cleared:
        found.clear()
    for removed in diff.removed:
        found.difference_update(removed.digests)
    for stored in diff.stored:
        found.update(stored.digests)
    return found


def listed(engine: EngineLoop) -> set[bytes]:
    blocks = engine.snapshots.list_blocks(9999, "", operator_pb.BLOCK_STATE_UNSPECIFIED).blocks
    return {bytes.fromhex(block.block_hash) for block in blocks} - {b""}


@run_by(run)
async def test_a_forced_reset_while_requests_run_changes_no_token(engine: EngineLoop, bench: Bench) -> None:
    bench.step_s = 0.01
    await read(engine.submit(command("old", EIGHT, 2)))
    pin = engine.queries.pin_prefix(EIGHT, ANY, 60)
    streams = [engine.submit(command(f"r{i}", [i, *EIGHT], 30)) for i in range(3)]
    started = len(bench.plans)
    await until(lambda: len(bench.plans) > started + 10)
    assert engine.queries.reset_prefix_cache(force=False) is None
    reset = engine.queries.reset_prefix_cache(force=True)
    assert reset is not None
    assert (reset.preempted_sequences, reset.ended_pins) == (3, 1)
    assert reset.removed_blocks > 0
    again = engine.queries.reset_prefix_cache(force=True)
    assert again is not None
    assert (again.preempted_sequences, again.ended_pins) == (0, 0)
    assert listed(engine) == set()
    assert engine.queries.cache.unpin(pin.pin_id) == 0
    assert await outcomes(engine, EIGHT) == [pb.BLOCK_OUTCOME_CLEARED] * 2
    assert [await read(stream) for stream in streams] == [expect([i, *EIGHT], 30) for i in range(3)]
    assert engine.statistics.stats().preemptions_total == 3


@run_by(run)
async def test_a_reset_is_refused_while_pins_hold_blocks(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", EIGHT, 1)))
    pin = engine.queries.pin_prefix(EIGHT, ANY, 60)
    assert (pin.pinned_tokens, engine.queries.reset_prefix_cache(force=False)) == (8, None)
    assert engine.queries.cache.unpin(pin.pin_id) == 8
    assert engine.queries.reset_prefix_cache(force=False) == operator_pb.ResetPrefixCacheResponse(removed_blocks=2)


@run_by(run)
async def test_watchers_see_a_reset_though_nothing_runs(engine: EngineLoop) -> None:
    """A reset is a step boundary of its own: watchers need no step to learn of it."""
    await read(engine.submit(command("a", EIGHT, 1)))
    await asyncio.sleep(0)
    watch = engine.queries.watch_events()
    assert len(watch.take_snapshot(99)) == 2
    assert engine.queries.reset_prefix_cache(force=False) == operator_pb.ResetPrefixCacheResponse(removed_blocks=2)
    told = await asyncio.wait_for(watch.take(), 60)
    assert told.cleared
    assert not told.stored
    watch.close()


@run_by(run)
async def test_pins_are_gauges_and_a_state_of_blocks(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", [*EIGHT, 8, 9, 10, 11], 1)))
    pins = [engine.queries.pin_prefix(prompt, ANY, 60).pin_id for prompt in (EIGHT, EIGHT[:4], EIGHT)]
    stats = engine.statistics.stats()
    assert (stats.pins, stats.pinned_blocks, stats.active_blocks, stats.cached_free_blocks) == (3, 2, 2, 1)
    assert (stats.published_blocks, stats.kv_usage) == (3, 2 / 64)
    ends = [pin.expire_time.ToMilliseconds() / 1e3 for pin in engine.queries.cache.list_pins().pins]
    assert ends == pytest.approx([time.time() + 60] * 3, abs=30)
    blocks = engine.snapshots.list_blocks(99, "", operator_pb.BLOCK_STATE_PINNED).blocks
    assert sorted((block.ref_count, block.pins) for block in blocks) == [(2, 2), (3, 3)]
    assert engine.snapshots.list_blocks(99, "", operator_pb.BLOCK_STATE_ACTIVE) == operator_pb.ListBlocksResponse()
    check_engine(engine.queries)
    for pin in pins:
        engine.queries.cache.unpin(pin)
    assert engine.queries.pin_prefix([40, 41, 42, 43], ANY, 60).pin_id == ""


@run_by(run)
async def test_an_id_of_another_namespace_ends_no_pin_where_nothing_is_cached(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", EIGHT, 1)))
    engine.queries.pin_prefix(EIGHT, ANY, 60, "mine")
    with pytest.raises(AlreadyExists) as caught:
        engine.queries.pin_prefix([40, 41, 42, 43], CacheIdentity("other"), 60, "mine")
    assert (caught.value.field, caught.value.kind, caught.value.name) == ("pin_id", "pin", "mine")
    assert [pin.pin_id for pin in engine.queries.cache.list_pins().pins] == ["mine"]
    engine.queries.cache.unpin("mine")


@pytest.mark.parametrize("other", [CacheIdentity("b"), ANY, CacheIdentity("a", "lora"), CacheIdentity("a", tenant="t")])
@run_by(run)
async def test_another_namespace_adapter_or_tenant_finds_nothing(engine: EngineLoop, *, other: CacheIdentity) -> None:
    """Requests compute everything, lookups and explanations know of nothing, and there is nothing to pin."""
    mine = CacheIdentity("a")
    await read(engine.submit(identified("first", [*EIGHT, 8], mine)))
    assert engine.queries.lookup_prefix(EIGHT, mine).device_tokens == 8
    found = engine.queries.lookup_prefix(EIGHT, other)
    assert (found.device_tokens, found.partial_tokens, list(found.block_ids)) == (0, 0, [])
    assert pb.BLOCK_OUTCOME_HIT not in await outcomes(engine, EIGHT, other)
    assert engine.queries.pin_prefix(EIGHT, other, 60).pin_id == ""
    await read(engine.submit(identified("second", [*EIGHT, 8], other)))
    assert engine.statistics.stats().cached_tokens_total == 0
    assert engine.queries.lookup_prefix(EIGHT, other).device_tokens == 8
    await read(engine.submit(identified("third", [*EIGHT, 8], mine)))
    assert engine.statistics.stats().cached_tokens_total == 8


@run_by(run)
async def test_a_lease_ends_by_itself(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", EIGHT, 1)))
    engine.queries.pin_prefix(EIGHT, ANY, 60)
    later = engine._state.cache._clock() + 61
    engine._state.cache._clock = engine._state.cache.pins._clock = lambda: later
    engine._state.cache._arm()  # the timer that runs would fire in a minute
    await until(lambda: engine.statistics.stats().pins == 0)
    assert engine.statistics.stats().active_blocks == 0


@run_by(run, num_device_blocks=10)
async def test_a_request_that_pins_leave_no_room_for_is_refused_and_the_other_way_round(
    engine: EngineLoop, bench: Bench
) -> None:
    bench.step_s = 0.01
    prompt = [i % 50 for i in range(24)]
    await read(engine.submit(command("a", prompt, 1)))
    large = engine.submit(command("large", [1, 2, 3], 31))  # needs 9 of 10 blocks
    with pytest.raises(LimitExceeded, match="2 of 10 blocks would be pinned, and a live request may need 9"):
        engine.queries.pin_prefix(prompt[:8], ANY, 60)
    engine.queries.pin_prefix(prompt[:4], ANY, 60)
    assert await read(large) == expect([1, 2, 3], 31)
    pin = engine.queries.pin_prefix(prompt[:4], ANY, 60)
    with pytest.raises(LimitExceeded, match="need 10 blocks; 1 of 10 are pinned") as refused:
        engine.submit(command("x", [1, 2, 3], 38))
    assert refused.value.metadata == {"needed_blocks": "10", "available_blocks": "9", "pinned_blocks": "1"}
    assert await read(engine.submit(command("y", [1, 2, 3], 34))) == expect([1, 2, 3], 34)
    assert (await outcomes(engine, prompt))[0] is pb.BLOCK_OUTCOME_HIT
    assert pin.pinned_tokens == 4
    engine.queries.reset_prefix_cache(force=True)


@run_by(run, num_device_blocks=8)
async def test_steady_pressure_preempts_rather_than_evicts_what_is_pinned(engine: EngineLoop) -> None:
    """Others' blocks are evicted, the pinned ones hit to the end and are all that is held then."""
    await read(engine.submit(command("a", EIGHT, 1)))
    engine.queries.pin_prefix(EIGHT, ANY, 60)
    assert engine.statistics.stats().evicted_blocks_total == 0
    streams = [engine.submit(command(f"r{i}", [40 + i] * 4, 16)) for i in range(2)]
    assert [await read(stream) for stream in streams] == [expect([40 + i] * 4, 16) for i in range(2)]
    assert engine.statistics.stats().preemptions_total > 0
    assert engine.statistics.stats().evicted_blocks_total > 0
    assert engine.statistics.stats().active_blocks == engine.statistics.stats().pinned_blocks == 2
    assert await outcomes(engine, EIGHT) == [pb.BLOCK_OUTCOME_HIT] * 2
    engine.queries.reset_prefix_cache(force=True)


@run_by(run)
async def test_watchers_follow_the_table_through_a_lost_executor(engine: EngineLoop, bench: Bench) -> None:
    bench.step_s = 0.01
    await read(engine.submit(command("a", EIGHT, 1)))
    engine.queries.pin_prefix(EIGHT, ANY, 60)
    early, late = engine.queries.watch_events(), engine.queries.watch_events()
    stream = engine.submit(command("b", [7, *EIGHT], 30))
    await until(lambda: len(bench.plans) > 10)
    assert bench.link is not None
    bench.link.lose()
    await until(lambda: len(bench.attaches) == 2)
    assert engine.statistics.stats().pins == 0
    assert await outcomes(engine, EIGHT) == [pb.BLOCK_OUTCOME_CLEARED] * 2
    assert await read(stream) == expect([7, *EIGHT], 30)
    engine._state.cache.log.step_boundary(engine.statistics.stats().steps_total)
    assert followed(early) == followed(late) == listed(engine) != set()
    assert engine.statistics.stats().watchers == 2
    early.close()
    assert engine.statistics.stats().watchers == 1


@in_event_loop
async def test_stopping_ends_every_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(engine_loop, "ExecutorLink", lambda target, wake, credentials: Link(bench, wake))
    engine = EngineLoop(config())
    task = asyncio.create_task(engine.run())
    await engine.wait_ready()
    watch = engine.queries.watch_events()
    await engine.stop(0)
    with pytest.raises(Draining, match="shutting down"):
        await watch.take()
    with pytest.raises(Draining, match="shutting down"):
        engine.queries.watch_events()
    await task


@run_by(run)
async def test_what_requests_of_another_adapter_cached_is_explained_in_its_own_namespace_alone(
    engine: EngineLoop,
) -> None:
    """The engine notes the adapters of accepted requests, and makes the roots that the prompt has with them."""
    await read(engine.submit(identified("a", EIGHT, CacheIdentity("mine", "lora"))))
    other = pb.BLOCK_OUTCOME_OTHER_IDENTITY
    assert await outcomes(engine, EIGHT, CacheIdentity("mine")) == [other, other]
    assert await outcomes(engine, EIGHT, CacheIdentity("yours")) == [pb.BLOCK_OUTCOME_NEVER_SEEN] * 2


@run_by(run)
async def test_lookups_tell_what_a_copy_would_serve(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", EIGHT, 1)))
    match = engine.queries.lookup_prefix([0, 1, 2, 3, 4, 5, 9], ANY)
    assert (match.device_tokens, match.partial_tokens, list(match.block_ids)) == (4, 2, [0])
    assert engine.queries.lookup_prefix(EIGHT, ANY).partial_tokens == 0


@run_by(run, limits=SchedulerLimits(64, 32, 0.0, partial_hits=False))
async def test_lookups_tell_of_no_copy_where_none_is_made(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", EIGHT, 1)))
    match = engine.queries.lookup_prefix([0, 1, 2, 3, 4, 5, 9], ANY)
    assert (match.device_tokens, match.partial_tokens) == (4, 0)


@in_event_loop
async def test_nothing_is_served_before_an_executor_was_attached() -> None:
    engine = EngineLoop(config())
    for call in (
        lambda: engine.queries.pin_prefix([1], ANY, 1),
        lambda: engine.queries.cache.unpin("pin-1"),
        lambda: engine.queries.reset_prefix_cache(force=True),
        engine.queries.watch_events,
        lambda: engine.snapshots.list_blocks(1, "", operator_pb.BLOCK_STATE_FREE),
    ):
        with pytest.raises(Unavailable, match="no executor"):
            call()
    for asking in (engine.queries.prepare([1], ANY), engine.queries.explain_prefix([1], ANY, 1)):
        with pytest.raises(Unavailable, match="no executor"):
            await asking
    await engine.stop(0)


@run_by(run)
async def test_looking_a_prompt_up_counts_its_full_blocks(engine: EngineLoop) -> None:
    await read(engine.submit(command("a", list(range(8)))))
    assert engine.queries.lookup_prefix(list(range(8)), CacheIdentity()).device_tokens == 8
    assert engine.queries.lookup_prefix(list(range(7)), CacheIdentity()).device_tokens == 4
    assert engine.queries.lookup_prefix(list(range(8)), CacheIdentity(namespace="other")).device_tokens == 0
    assert engine.queries.reset_prefix_cache(force=False) == operator_pb.ResetPrefixCacheResponse(removed_blocks=3)
    assert engine.queries.lookup_prefix(list(range(8)), CacheIdentity()).device_tokens == 0


def test_a_lookup_goes_on_in_the_host_pool_where_the_device_ends() -> None:
    """Tokens are counted by tier; a gap ends both, and a block of another content is a miss."""
    pool, host = BlockPool(4, 2), HostPool(4, 2)
    admin = CacheAdmin(True, 0.5, lambda: None)
    admin.adopt(pool, host, "model", Observer())
    scheduler = Scheduler(pool, SchedulerLimits(), (), host)
    queries = EngineQueries(EngineState(config(), admin, LiveRequests(0), scheduler=scheduler))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    digests = chain_digests(root_digest("model", "", ""), token_bytes(tokens), 2)
    rows = np.array(tokens[:8], np.uint32).reshape(-1, 2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.publish_chain(blocks, digests[:1], root_digest("model", "", ""), rows[:1], first=True, media=False)
    host.keep([digests[1], digests[3]], rows[[1, 3]], [digests[0], digests[2]])
    match = queries.lookup_prefix(tokens, CacheIdentity())
    assert (match.device_tokens, match.host_tokens, match.partial_tokens) == (2, 2, 0)
    host.keep(digests[2:3], rows[2:3], digests[1:2])
    assert queries.lookup_prefix(tokens, CacheIdentity()).host_tokens == 6
    explained = asyncio.run(queries.explain_prefix(tokens, CacheIdentity(), 99))
    assert [block.outcome for block in explained.blocks] == [pb.BLOCK_OUTCOME_HIT] * 4 + [pb.BLOCK_OUTCOME_PARTIAL_TAIL]
    assert [block.HasField("block_id") for block in explained.blocks] == [True] + [False] * 4
    assert queries.lookup_prefix([*tokens[:4], 0, 0], CacheIdentity()).host_tokens == 2
    assert queries.lookup_prefix(tokens, CacheIdentity(namespace="other")).host_tokens == 0
