"""Two sequences that hold one content: what they publish stays findable whichever of them ends first."""

from __future__ import annotations

import pytest
from support.engine.scheduler_driver import Driver, expect, finished, output

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def cached(driver: Driver, prompt: list[int], identity: CacheIdentity | None = None) -> int:
    """Cached tokens of a prompt that comes when all else has ended."""
    driver.drain()
    request = driver.submit(prompt, max_tokens=1, identity=identity)
    driver.drain()
    assert output(request) == expect(prompt, 1)
    tokens = request.sequences[0].cached_tokens
    assert tokens is not None
    return tokens


def fill(driver: Driver, *, tokens: int) -> None:
    """Other prompts that need all of the pool that nobody holds, one after the other."""
    for number in range(4):
        other = driver.submit([50 + number] * tokens, max_tokens=1)
        while not output(other):
            driver.step()


@pytest.mark.parametrize("position", [0, 3, 4, 5, 7])
def test_a_medium_that_begins_inside_a_twin_stops_nobody_from_publishing(position: int) -> None:
    """The second of two equal prompts computes its last block itself, and has to go on after it."""
    driver = Driver(block_size=4)
    identity = CacheIdentity(media=(MediaSpan(position, 1, "cat"),))
    driver.submit(PROMPT, max_tokens=1, identity=identity)
    driver.submit(PROMPT, max_tokens=13, identity=identity)
    turn = [*PROMPT, *expect(PROMPT, 13)]
    assert cached(driver, [*turn, 9], identity) == 20
    assert cached(driver, [*turn, 9]) == position // 4 * 4


@pytest.mark.parametrize("media", [(), (MediaSpan(2, 1, "cat"),), (MediaSpan(6, 1, "cat"),)])
@pytest.mark.parametrize("host_blocks", [0, 8])
def test_a_running_sequence_keeps_the_prefix_that_another_published(
    media: tuple[MediaSpan, ...], host_blocks: int
) -> None:
    """The first of two equal prompts ends, its blocks are cached, and others need their memory: the second one's take
    their entries over, so what it publishes later still has its prefix in the table.
    """
    driver = Driver(num_blocks=12, block_size=4, depth=1, host_blocks=host_blocks, write_back=bool(host_blocks))
    identity = CacheIdentity(media=media)
    first = driver.submit(PROMPT, max_tokens=1, identity=identity)
    second = driver.submit(PROMPT, max_tokens=21, identity=identity)
    while not output(first):
        driver.step()
    fill(driver, tokens=16)
    assert driver.pool.evictions
    turn = [*PROMPT, *expect(PROMPT, 21)]
    assert cached(driver, [*turn, 9], identity) == 28
    assert output(second) == turn[len(PROMPT) :]
    # None of it had to come back from the host.
    assert driver.scheduler.counters.swapped_in == 0


def test_blocks_that_two_sequences_generated_alike_stay_for_both() -> None:
    """Each fills its own blocks with the same tokens; the one whose blocks have the entries is aborted first."""
    driver = Driver(num_blocks=20, block_size=4, depth=1)
    first, second = (driver.submit(PROMPT[:6], max_tokens=30) for _ in range(2))
    while len(output(second)) < 12:
        driver.step()
    driver.abort(first)
    fill(driver, tokens=40)
    turn = [*PROMPT[:6], *expect(PROMPT[:6], 30)]
    assert cached(driver, [*turn, 9]) == 32


def test_of_several_twins_the_next_takes_over_when_one_ends() -> None:
    driver = Driver(num_blocks=24, block_size=4, depth=1)
    requests = [driver.submit(PROMPT, max_tokens=2 + 6 * number) for number in range(4)]
    for request in requests[:3]:
        while not finished(request):
            driver.step()
        fill(driver, tokens=24)
    turn = [*PROMPT, *expect(PROMPT, 20)]
    assert cached(driver, [*turn, 9]) == 24


def test_nothing_is_published_after_blocks_that_a_reset_took_out() -> None:
    """A sequence that drains meanwhile holds them on, but nothing tells any more what they are worth."""
    driver = Driver(block_size=4, depth=2)
    request = driver.submit(PROMPT, max_tokens=30)
    while len(output(request)) < 2:
        driver.step()
    driver.scheduler.clear_prefix_cache()
    driver.drain()
    assert driver.pool.num_published == 0
    assert cached(driver, [*PROMPT, *output(request)]) == 0
