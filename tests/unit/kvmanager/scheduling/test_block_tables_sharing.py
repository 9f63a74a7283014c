"""How many blocks sharing saves, in numbers, and that its two kinds are two switches."""

from __future__ import annotations

import pytest
from support.engine.scheduler_driver import Driver, copies, expect, finished, results
from support.executor.wire_driver import WireDriver, expected_results

from pagekv.kvmanager.scheduling.sequence import LiveRequest


def peak_blocks(driver: Driver) -> int:
    """Runs everything to its end; blocks held at once at most."""
    peak = 0
    while True:
        driver.plan()
        peak = max(peak, driver.pool.num_active)
        if not driver.step():
            assert driver.pool.num_active == 0
            return peak


def search(prompt: int, width: int, new: int, block_size: int, fork_sharing: bool) -> tuple[LiveRequest, Driver]:
    # No prefix cache: what is saved is saved by the search alone.
    driver = WireDriver(
        256, block_size, prefix_cache=False, fork_sharing=fork_sharing, depth=1, vocab=50, max_running=width
    )
    request = driver.submit(list(range(prompt)), max_tokens=new, n=width, beam_width=width)
    return request, driver


@pytest.mark.parametrize(
    ("prompt", "width", "block_size", "shared", "alone"),
    [
        # The full blocks of the prompt once, and for each beam the block it writes.
        (9, 4, 4, 2 + 4, 4 * 3),
        (40, 4, 16, 2 + 4, 4 * 3),
        (40, 8, 4, 10 + 8, 8 * 11),
        # One token a block: nothing is ever partial, so nothing is copied.
        (9, 4, 1, 9 + 4, 4 * 10),
        # Nothing is full yet: as many blocks as without sharing.
        (3, 4, 16, 4, 4),
    ],
)
def test_blocks_of_beams_that_have_just_parted(
    prompt: int, width: int, block_size: int, shared: int, alone: int
) -> None:
    held = []
    for fork_sharing in (True, False):
        request, driver = search(prompt, width, 8, block_size, fork_sharing)
        while len(request.sequences) < width or any(not s.block_table for s in request.sequences):
            driver.step()
        # One step more, so that every beam has the block for its next token.
        driver.plan()
        held.append(driver.pool.num_active)
    assert held == [shared, alone]


@pytest.mark.parametrize(
    ("prompt", "width", "new", "block_size", "shared", "alone"),
    [(50, 2, 14, 4, 17, 32), (50, 4, 14, 4, 21, 64), (50, 8, 14, 4, 29, 128), (50, 4, 14, 16, 7, 16)],
)
def test_blocks_of_a_whole_search_at_their_peak(
    prompt: int, width: int, new: int, block_size: int, shared: int, alone: int
) -> None:
    """A search holds 47, 67, 77 and 56 % fewer blocks than beams that share nothing, and finds the same.

    At most the prompt once and every beam's own tokens; fewer, because beams that parted late share those before.
    """
    peaks, found = [], []
    for fork_sharing in (True, False):
        request, driver = search(prompt, width, new, block_size, fork_sharing)
        peaks.append(peak_blocks(driver))
        found.append(results(request))
    assert peaks == [shared, alone]
    assert alone == width * -(-(prompt + new - 1) // block_size)
    assert shared <= prompt // block_size + width * (alone // width - prompt // block_size)
    assert found[0] == found[1] == expected_results(request.command, 50, ())


@pytest.mark.parametrize(("new", "blocks"), [(2, 2 + 5), (6, 2 + 5 * 2), (10, 2 + 5 * 3)])
def test_five_continuations_hold_the_prompt_once_and_their_own_tokens_each(new: int, blocks: int) -> None:
    """A prompt of 10 in blocks of 4 is two blocks for all, and one with two tokens that each copies."""
    driver = Driver(prefix_cache=False, depth=1)
    request = driver.submit(list(range(10)), max_tokens=new, n=5)
    assert peak_blocks(driver) == blocks
    assert sum(len(copies(plan)) for plan in driver.plans) == 4
    assert finished(request)


# (prefix cache, fork sharing) -> blocks of n = 5 at their peak, and tokens that the next request finds.
TWO_SWITCHES = [
    ((True, True), 2 + 5 * 2, 8),
    ((False, True), 2 + 5 * 2, 0),
    # Each continuation is admitted by itself and hits what the first has published.
    ((True, False), 2 + 5 * 2, 8),
    ((False, False), 5 * 4, 0),
]


@pytest.mark.parametrize(("switches", "blocks", "cached"), TWO_SWITCHES)
def test_sharing_within_a_request_and_between_requests_are_two_switches(
    switches: tuple[bool, bool], blocks: int, cached: int
) -> None:
    prefix_cache, fork_sharing = switches
    prompt = list(range(10))
    driver = Driver(prefix_cache=prefix_cache, fork_sharing=fork_sharing, depth=1)
    request = driver.submit(prompt, max_tokens=6, n=5)
    assert peak_blocks(driver) == blocks
    # Only a fork copies: with partial hits off, what the prefix cache gives are full blocks.
    assert sum(len(copies(plan)) for plan in driver.plans) == (4 if fork_sharing else 0)
    after = driver.submit(prompt, max_tokens=6)
    driver.drain()
    assert after.sequences[0].cached_tokens == cached
    wanted = expect(prompt, 6)
    assert [*results(request), *results(after)] == [wanted] * 6
