"""Counters of prompt blocks that hit, and of the reasons why prompts miss."""

from __future__ import annotations

from support.engine.engine_harness import command, identified, read, run
from support.engine.scheduler_driver import Driver, expect
from support.engine.states import state_of
from support.event_loop import run_by

from pagekv.kvmanager.engine.cache_admin import CacheAdmin
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.kvmanager.engine.statistics import EngineStatistics
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity

ANY = CacheIdentity()


EIGHT = [*range(8)]


@run_by(run, num_device_blocks=16)
async def test_misses_are_counted_by_their_reason(engine: EngineLoop) -> None:
    """Each prompt counts once, for its first block that misses."""

    async def misses(prompt: list[int], identity: CacheIdentity = ANY) -> str:
        before = engine.statistics.stats()
        await read(engine.submit(identified("r", prompt, identity)))
        after = engine.statistics.stats()
        names = [field.name for field in after.DESCRIPTOR.fields if field.name.startswith("misses_")]
        found = [name for name in names if getattr(after, name) > getattr(before, name)]
        assert sum(getattr(after, name) - getattr(before, name) for name in names) == len(found)
        return " ".join(name.removeprefix("misses_").removesuffix("_total") for name in found)

    assert await misses([*EIGHT, 9]) == "never_seen"
    assert await misses([*EIGHT, 9]) == "partial_tail"
    # A hit throughout: one token of the last block had to be computed all the same.
    assert await misses(EIGHT) == ""
    assert await misses([0, 1, 2, 3, 4, 9, 9, 9]) == "diverged"
    assert await misses([1]) == "partial_tail"
    assert await misses(EIGHT, CacheIdentity(namespace="other")) == "never_seen"
    assert await misses([30] * 8, CacheIdentity(read=False)) == ""
    assert await misses([31] * 8, CacheIdentity(write=False)) == "never_seen"
    engine.queries.reset_prefix_cache(force=False)
    assert await misses(EIGHT) == "cleared"
    for number in range(8):
        await read(engine.submit(command(f"s{number}", [number + 20] * 28, 1)))
    assert engine.statistics.stats().evicted_blocks_total > 0
    assert await misses(EIGHT) == "evicted"


@run_by(run)
async def test_both_hit_rates_are_exported_under_their_own_names(engine: EngineLoop) -> None:
    """Cached blocks of prompt blocks, and cached tokens of prompt tokens."""
    await read(engine.submit(command("a", [*EIGHT, 9], 1)))
    await read(engine.submit(command("b", [*EIGHT, 7, 7], 1)))
    stats = engine.statistics.stats()
    assert (stats.prompt_blocks_total, stats.cached_blocks_total, stats.block_hit_rate) == (6, 2, 2 / 6)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total, stats.prefix_hit_rate) == (19, 8, 8 / 19)


def test_blocks_of_the_host_pool_are_counted_as_hits_and_not_as_evicted() -> None:
    """The device has evicted the prompt, and the second tier of the cache serves all of its full blocks."""
    driver = Driver(num_blocks=4, block_size=4, host_blocks=16, write_back=True, depth=1)
    cache = CacheAdmin(True, 0.5, lambda: None)
    statistics = EngineStatistics(state_of(driver, cache))
    for prompt in ([*range(13)], [*range(30, 45)], [*range(60, 75)], [*range(13)]):
        driver.submit(prompt, max_tokens=1)
        plan = driver.plan()
        assert plan is not None
        cache.count_admissions(plan.admitted)
        driver.drain()
    found = statistics.stats()
    assert (found.cached_blocks_total, found.cached_tokens_total) == (3, 12)
    assert (found.block_hit_rate, found.prefix_hit_rate) == (3 / 16, 12 / 56)
    assert (found.misses_never_seen_total, found.misses_evicted_total, found.misses_partial_tail_total) == (3, 0, 1)


def test_blocks_of_an_answer_that_goes_on_are_no_blocks_of_its_prompt() -> None:
    """All four full blocks are found, of which the prompt of six tokens has one; another holds its end and the answer's
    beginning.
    """
    driver = Driver(block_size=4, depth=1)
    cache = CacheAdmin(True, 0.5, lambda: None)
    statistics = EngineStatistics(state_of(driver, cache))
    prompt = [*range(6)]
    answer = expect(prompt, 11)
    for tokens, resumed in ((prompt, 0), ([*prompt, *answer[:11]], 11)):
        driver.submit(tokens, max_tokens=12, resumed=resumed)
        while (plan := driver.plan()) is not None:
            cache.count_admissions(plan.admitted)
            driver.complete()
    found = statistics.stats()
    assert (found.prompt_blocks_total, found.cached_blocks_total) == (4, 1)
    assert (found.prompt_tokens_total, found.cached_tokens_total) == (12, 6)
