"""Sequences that the executor gives up: the request ends, nothing of it is hit, and everybody else is right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.engine.fake_executor import expected_beams
from support.engine.scheduler_driver import VOCAB, Driver, expect, finished, output, results, right, streamed

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import Committed, StepPlan, StepResult

# No executor chooses it.
BAD = VOCAB


class FailingDriver(Driver):
    """Requests whose prompt ends with BAD fail where they would sample first, or when they have so many outputs."""

    def __init__(self, outputs: int = 0, **fields: Any) -> None:
        self.failed: list[LiveRequest] = []
        self.outputs = outputs
        super().__init__(**fields)
        commit = self.scheduler.commit

        def noting(plan: StepPlan, result: StepResult) -> Committed:
            committed = commit(plan, result)
            assert all(why == "it was told to" for _, why in committed.failed)
            self.failed += [request for request, _ in committed.failed]
            return committed

        self.scheduler.commit = noting  # type: ignore[method-assign]  # what the engine loop does with it

    def _new_executor(self) -> Any:
        executor = super()._new_executor()
        executor.fails = lambda prefix: BAD in prefix and len(prefix) - 1 - prefix.index(BAD) == self.outputs
        return executor


def cached(driver: Driver, prompt: list[int]) -> int:
    """Tokens of a prompt that are hit."""
    request = driver.submit(prompt, max_tokens=1)
    driver.drain()
    return request.sequences[0].cached_tokens or 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("outputs", [0, 1, 5, 6])
def test_a_request_fails_and_the_others_go_on(depth: int, outputs: int) -> None:
    driver = FailingDriver(outputs, depth=depth)
    bad = driver.submit([1, 2, 3, 4, 5, BAD], max_tokens=20)
    good = driver.submit([6, 7, 8], max_tokens=20)
    driver.drain()
    assert driver.failed == [bad]
    assert finished(bad)
    assert right(good)
    assert streamed(good)[0] == output(good)
    # Tokens sampled before are right, and were delivered.
    assert streamed(bad) == (expect([1, 2, 3, 4, 5, BAD], outputs), None)


@pytest.mark.parametrize("host_blocks", [0, 32])
def test_nothing_of_a_prompt_that_failed_is_hit(host_blocks: int) -> None:
    """In chunks: an earlier one may be what made the last one fail."""
    prompt = [*range(20), BAD]
    driver = FailingDriver(max_batch_tokens=8, host_blocks=host_blocks, preemption="swap", write_back=bool(host_blocks))
    bad = driver.submit(prompt, max_tokens=4)
    driver.drain()
    assert driver.failed == [bad]
    assert driver.pool.num_published == 0
    assert cached(driver, [*range(20), 50]) == 0


def test_blocks_that_tokens_were_sampled_from_stay() -> None:
    """Else one request would empty the cache for all that begin as it does."""
    driver = FailingDriver(outputs=5)
    prompt = [*range(11), BAD]
    driver.submit(prompt, max_tokens=20)
    driver.drain()
    assert len(driver.failed) == 1
    # The step that failed computed position 16, the first of its block.
    again = [*prompt, *expect(prompt, 9)]
    assert len(driver.scheduler.pool.match(*_looked_up(driver, again))) == 4


def _looked_up(driver: Driver, tokens: list[int]) -> tuple[bytes, list[bytes], Any]:
    sequence = driver.submit(tokens).sequences[0]
    driver.scheduler._tables.publisher.extend_digests(sequence)
    return sequence.request.root, sequence.digests, sequence.chunks(driver.block_size, 0, len(sequence.digests))


@pytest.mark.parametrize("partial_hits", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_whoever_hit_its_blocks_meanwhile_computes_them_anew(delay: int, partial_hits: bool) -> None:
    """A prompt that begins alike is admitted in the same step, or in the one behind it, before the answer."""
    driver = FailingDriver(partial_hits=partial_hits, max_batch_tokens=100)
    common = list(range(10, 26))
    bad = driver.submit([*common, BAD], max_tokens=8)
    if delay:
        driver.plan()
    alike = driver.submit([*common, 60, 61], max_tokens=8)
    nearly = driver.submit([*common[:6], 62], max_tokens=8)
    driver.drain()
    assert driver.failed == [bad]
    assert (alike.sequences[0].cached_tokens, right(alike), right(nearly)) == (16, True, True)
    assert alike.sequences[0].preemptions == 1
    # And what they computed themselves can be hit.
    assert cached(driver, [*common, 63]) == 16


@pytest.mark.parametrize("width", [0, 2])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_reader_that_fails_for_what_it_hit_is_computed_anew(delay: int, width: int) -> None:
    """It is not to blame: the block that it read is void."""
    driver = FailingDriver(max_batch_tokens=100)
    common = list(range(10, 26))
    reader = (*common, 60, 61)
    fails, infected = driver.executor.fails, {reader}

    def fails_once(prefix: tuple[int, ...]) -> bool:
        once = prefix in infected
        infected.discard(prefix)
        return once or bool(fails(prefix))

    driver.executor.fails = fails_once
    bad = driver.submit([*common, BAD], max_tokens=8)
    if delay:
        driver.plan()
    alike = driver.submit(list(reader), max_tokens=8, beam_width=width, n=width or 1)
    driver.drain()
    assert not infected
    assert driver.failed == [bad]
    assert alike.sequences[0].preemptions >= 1
    if width:
        assert alike.search is not None
        fresh = Driver().submit(list(reader), max_tokens=8, beam_width=width, n=width)
        assert fresh.search is not None
        assert results(alike) == [list(tokens) for tokens in expected_beams(list(reader), fresh.search, VOCAB)]
    else:
        assert right(alike)
    assert cached(driver, [*common, 63]) == 16


def test_of_prompts_that_always_fail_each_ends() -> None:
    """Though each but the first begins as one that fails in the same step."""
    driver = FailingDriver(max_batch_tokens=1000, num_blocks=256)
    prompts = [[*range(10, 10 + 4 * count), BAD] for count in (6, 4, 5, 5, 2)]
    bad = [driver.submit(prompt, max_tokens=8) for prompt in prompts]
    driver.drain()
    assert sorted(driver.failed, key=id) == sorted(bad, key=id)
    assert driver.pool.num_published == 0


def test_a_sequence_that_was_aborted_before_its_step_failed() -> None:
    driver = FailingDriver()
    bad = driver.submit([*range(8), BAD], max_tokens=8)
    driver.plan()
    driver.abort(bad)
    driver.drain()
    assert driver.failed == []
    assert driver.pool.num_published == 0


def test_a_sequence_that_was_preempted_before_its_step_failed() -> None:
    driver = FailingDriver(host_blocks=32, preemption="swap")
    bad = driver.submit([*range(8), BAD], max_tokens=8)
    driver.plan()
    driver.scheduler.preempt_all()
    driver.drain()
    assert driver.failed == [bad]
    assert driver.pool.num_published == driver.host.num_cached == driver.host.num_held == 0


def test_whoever_holds_what_it_hit_keeps_none_of_that_for_others() -> None:
    """Blocks that it hit left the table; a holder that is swapped out afterwards gets them back, under no key."""
    driver = FailingDriver(host_blocks=32, preemption="swap", depth=1)
    common = list(range(10, 26))
    holder = driver.submit([*common, 60], max_tokens=12)
    driver.step()
    bad = driver.submit([*common, BAD], max_tokens=8)
    driver.step()
    assert (driver.failed, bad.sequences[0].cached_tokens) == ([bad], 16)
    driver.scheduler.preempt_all()
    assert (driver.host.num_held, driver.host.num_cached) == (5, 0)
    driver.drain()
    assert right(holder)
    assert cached(driver, [*common, 61]) == 0


def test_readers_give_their_blocks_back_in_order() -> None:
    """The same calls make the same decisions, so the order is not that of a set, which is of addresses in memory."""
    driver = FailingDriver(depth=1, max_batch_tokens=1000, num_blocks=256, max_running=64)
    common = list(range(10, 26))
    bad = driver.submit([*common, BAD], max_tokens=8)
    readers = [driver.submit([*common, last]) for last in range(30, 60)]
    driver.step()
    assert driver.failed == [bad]
    plan = driver.plan()
    assert plan is not None
    assert [sequence.request for sequence, _ in plan.preempted] == readers
    driver.drain()
    assert all(right(reader) for reader in readers)


@pytest.mark.parametrize("outputs", [0, 2])
def test_all_sequences_of_the_request_end(outputs: int) -> None:
    driver = FailingDriver(outputs)
    bad, good = driver.submit([1, 2, 3, 4, 5, BAD], n=3), driver.submit([1, 2, 3, 4, 7], n=2)
    driver.drain()
    assert driver.failed == [bad]
    assert finished(bad)
    assert right(good)


def test_a_beam_that_fails_ends_its_search_alone() -> None:
    driver = FailingDriver(outputs=2)
    bad, good = (driver.submit(prompt, beam_width=3, n=2) for prompt in ([1, 2, 3, BAD], [1, 2, 3, 4, 5]))
    driver.drain()
    assert driver.failed == [bad]
    assert good.search is not None
    fresh = Driver().submit([1, 2, 3, 4, 5], beam_width=3, n=2)
    assert fresh.search is not None
    assert results(good) == [list(tokens) for tokens in expected_beams([1, 2, 3, 4, 5], fresh.search, VOCAB)]


@pytest.mark.parametrize("seed", range(30))
def test_any_traffic(seed: int) -> None:
    """Requests that share prefixes with those that fail, in small pools, with everything else that can happen."""
    chance = random.Random(seed)
    driver = FailingDriver(
        chance.choice([0, 0, 1, 3]),
        num_blocks=chance.choice([14, 24, 64]),
        max_batch_tokens=chance.choice([5, 16, 64]),
        partial_hits=chance.random() < 0.5,
        host_blocks=chance.choice([0, 12]),
        preemption=chance.choice(["swap", "recompute"]),
        write_back=chance.random() < 0.5,
        prefix_cache=chance.random() < 0.8,
    )
    stems = [[chance.randrange(90) for _ in range(12)] for _ in range(2)]
    aborted: set[LiveRequest] = set()
    for _ in range(120):
        if chance.random() < 0.4:
            stem = chance.choice(stems)[: chance.choice([3, 8, 12])]
            tail = [BAD] if chance.random() < 0.3 else [chance.randrange(90) for _ in range(chance.randrange(1, 4))]
            identity = CacheIdentity(read=chance.random() < 0.9, write=chance.random() < 0.9)
            width, most, n = 2 * (chance.random() < 0.15), chance.randrange(1, 12), chance.choice([1, 1, 2])
            driver.submit(stem + tail, most, n=n, identity=identity, beam_width=width)
        if chance.random() < 0.05 and driver.requests:
            request = chance.choice(driver.requests)
            if request not in driver.failed and not finished(request):
                aborted.add(request)
                driver.abort(request)
        if chance.random() < 0.03:
            driver.scheduler.preempt_all()
        if chance.random() < 0.02:
            driver.lose_executor()
        chance.choice([driver.plan, driver.step])()
    driver.drain()
    assert len(driver.failed) == len({*driver.failed})
    for request in driver.requests:
        assert finished(request)
        fails = BAD in request.command.prompt_ids and request.command.sampling.max_tokens > driver.outputs
        assert (request in driver.failed) == (fails and request not in aborted)
        if request.search is None and request not in aborted and not fails:
            assert right(request)
