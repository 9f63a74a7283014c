"""Sharing in the scheduler: cached prefixes, blocks of one request, and copies of parts of blocks."""

import random
import zlib

import pytest
from support.engine.fake_executor import expected_output
from support.engine.scheduler_driver import Driver, copies, expect, output

from pagekv.kvmanager.kvcache import block_hash
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.scheduling import publishing


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    driver = Driver()
    prompt = list(range(6))
    first = driver.submit(prompt, max_tokens=11)
    driver.drain()
    turn = [*prompt, *output(first), 50, 51]
    second = driver.submit(turn, max_tokens=2)
    driver.drain()
    assert second.sequences[0].cached_tokens == 16
    assert output(second) == expect(turn, 2)


def test_sequences_that_generate_the_same_blocks_know_them_by_the_right_digests() -> None:
    """Blocks of one token: the token of the next one is known when a block that another has published is offered."""
    driver = Driver(block_size=1, vocab=2, depth=1)
    requests = [driver.submit([0, 0, 0, 0], max_tokens=1), *(driver.submit([0], max_tokens=8) for _ in range(2))]
    while driver.step():
        for request in requests:
            (sequence,) = request.sequences
            chain = block_hash.chain_digests(request.root, sequence.token_ids.tobytes(), 1)
            assert sequence.digests == chain[: len(sequence.digests)]
    assert all(request.sequences[0].publishes for request in requests)
    assert driver.pool.hash_alarms == 0


def test_a_block_whose_last_token_was_never_computed_is_not_hit() -> None:
    """The last token of an output is sampled and not computed, so its slot stays unwritten."""
    driver = Driver()
    prompt = list(range(6))
    first = driver.submit(prompt, max_tokens=10)
    driver.drain()
    assert driver.pool.num_published == 3
    turn = [*prompt, *output(first), 50, 51]
    second = driver.submit(turn, max_tokens=2)
    driver.drain()
    assert second.sequences[0].cached_tokens == 12
    assert output(second) == expect(turn, 2)


def test_blocks_of_a_prompt_that_was_not_computed_to_its_end_are_not_hit() -> None:
    driver = Driver(max_batch_tokens=8, depth=1)
    prompt = list(range(20))
    first = driver.submit(prompt, max_tokens=1)
    driver.plan()
    driver.abort(first)
    second = driver.submit(prompt, max_tokens=3)
    driver.drain()
    assert second.sequences[0].cached_tokens == 8
    assert output(second) == expect(prompt, 3)


def test_a_request_may_leave_the_cache_unwritten_or_unread() -> None:
    driver = Driver()
    found = []
    for identity in (CacheIdentity(write=False), CacheIdentity(), CacheIdentity(read=False)):
        request = driver.submit(list(range(16)), max_tokens=1, identity=identity)
        driver.drain()
        found.append((request.sequences[0].cached_tokens, driver.pool.num_published))
    assert found == [(0, 0), (0, 4), (0, 4)]


@pytest.mark.parametrize("length", [8, 9, 10, 12])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_n_sequences_share_their_prompt_and_copy_the_block_they_write(length: int, prefix_cache: bool) -> None:
    """Blocks are prompt + n * new + one copy for each but the first, with or without a prefix
    cache; everybody computes the prompt's last token, nobody but the first the rest.
    """
    driver = Driver(prefix_cache=prefix_cache, depth=1)
    prompt = list(range(length))
    request = driver.submit(prompt, max_tokens=3, n=3)
    driver.step()
    (first,) = driver.scheduler.running
    assert first.block_table.tolist() == list(range(-(-length // 4)))
    driver.step()
    shared = (length - 1) // 4
    tables = [s.block_table.tolist() for s in request.sequences]
    assert [table[:shared] for table in tables] == [tables[0][:shared]] * 3
    assert driver.pool.num_active == len({block for table in tables for block in table})
    copied = 1 if (length - 1) % 4 else 0
    assert [destination for _, destination in copies(driver.plans[1])] == [t[shared] for t in tables[1:]][: 2 * copied]
    assert driver.executor.computed_tokens == length + 3
    driver.drain()
    assert [output(request, i) for i in range(3)] == [expect(prompt, 3)] * 3
    assert [s.cached_tokens for s in request.sequences] == [0, 0, 0]
    assert driver.pool.num_active == 0


@pytest.mark.parametrize("values", [1, 2, 5])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("host_blocks", [0, 12, 40])
def test_a_hash_with_few_values_costs_hits_and_never_an_output(
    values: int, seed: int, host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `values` digests in all, everything collides all the time."""

    class Weak:
        def __init__(self, data: bytes) -> None:
            self.value = zlib.crc32(data) % values

        def digest(self) -> bytes:
            return bytes([self.value]) * 32

    monkeypatch.setattr(block_hash, "sha256", Weak)
    monkeypatch.setattr(publishing, "sha256", Weak)
    chance = random.Random(seed)
    driver = Driver(
        num_blocks=24,
        block_size=2,
        max_running=4,
        partial_hits=bool(seed % 2),
        vocab=3,
        host_blocks=host_blocks,
        preemption="swap",
        write_back=True,
    )
    prompts = []
    for _ in range(60):
        prompts.append([chance.randrange(3) for _ in range(chance.randrange(1, 12))])
        driver.submit(prompts[-1], max_tokens=chance.randrange(1, 8))
        for _ in range(chance.randrange(3)):
            driver.step()
        if host_blocks and chance.random() < 0.2:
            driver.scheduler.preempt_all()
    driver.drain()
    for prompt, request in zip(prompts, driver.requests, strict=True):
        assert output(request) == expected_output(prompt, request.command.sampling.max_tokens, 3)
    assert driver.pool.hash_alarms > 0


@pytest.mark.parametrize("lacking", ["blocks", "slots", "budget"])
def test_a_fork_that_does_not_fit_is_refused_whole(lacking: str) -> None:
    """Not one of the three others is forked when only two could be; they queue, and every output is right."""
    driver = Driver(
        num_blocks=6 if lacking == "blocks" else 64,
        max_running=3 if lacking == "slots" else 16,
        max_batch_tokens=3 if lacking == "budget" else 64,
        depth=1,
    )
    prompt = list(range(14))
    request = driver.submit(prompt, max_tokens=3, n=4)
    while request.sequences[0].num_output == 0:
        driver.step()
    plan = driver.plan()
    assert plan is not None
    assert copies(plan) == []
    assert all(new.computed_tokens % 4 == 0 for new in plan.new)
    driver.drain()
    assert [output(request, i) for i in range(4)] == [expect(prompt, 3)] * 4


def test_a_fork_leaves_the_watermark_to_those_that_run_beside_it() -> None:
    """The copies are admitted like any newcomer: the others wait in the queue while a decode may need what is free."""
    driver = Driver(num_blocks=10, watermark=0.3, depth=1)
    beside = driver.submit([50, 51, 52], max_tokens=20)
    driver.step()
    request = driver.submit([1, 2, 3, 4, 5, 6], max_tokens=3, n=6)
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert copies(plan) == []
    assert driver.pool.num_free >= 3
    driver.drain()
    assert [output(request, i) for i in range(6)] == [expect([1, 2, 3, 4, 5, 6], 3)] * 6
    assert output(beside) == expect([50, 51, 52], 20)


def test_the_tail_of_a_prompt_is_copied_from_a_cached_block() -> None:
    """Three tokens of a block that shares three of four are copied and the fourth is computed."""
    driver = Driver(partial_hits=True)
    first = driver.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
    driver.drain()
    second = driver.submit([1, 2, 3, 4, 5, 6, 7, 99, 9], max_tokens=2)
    plan = driver.plan()
    assert plan is not None
    assert [(source, new) for source, new in copies(plan)] == [(1, second.sequences[0].block_table[1])]
    assert plan.num_tokens == 2
    driver.drain()
    assert second.sequences[0].cached_tokens == 7
    assert output(second) == expect([1, 2, 3, 4, 5, 6, 7, 99, 9], 2)
    assert output(first) == expect([1, 2, 3, 4, 5, 6, 7, 8, 9], 2)


def test_without_partial_hits_nothing_of_a_cached_block_is_copied() -> None:
    driver = Driver(partial_hits=False)
    driver.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
    driver.drain()
    second = driver.submit([1, 2, 3, 4, 5, 6, 7, 99, 9], max_tokens=2)
    plan = driver.plan()
    assert plan is not None
    assert (copies(plan), plan.num_tokens) == ([], 5)
    driver.drain()
    assert second.sequences[0].cached_tokens == 4


def test_a_copy_that_would_take_one_block_too_many_is_done_without() -> None:
    """The source must not be given away before it is copied, and here it has to be: every block is needed."""
    driver = Driver(num_blocks=4, partial_hits=True)
    driver.submit([1, 2, 3, 4, 5], max_tokens=1)
    driver.drain()
    prompt = [1, 2, 3, 9, *[7] * 12]
    request = driver.submit(prompt, max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    assert (copies(plan), plan.num_tokens) == ([], 16)
    driver.drain()
    assert output(request) == expect(prompt, 1)


def test_a_block_computed_in_this_very_step_is_not_copied_from() -> None:
    driver = Driver(partial_hits=True)
    driver.submit([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=2)
    second = driver.submit([1, 2, 3, 4, 5, 6, 9, 9], max_tokens=2)
    plan = driver.plan()
    assert plan is not None
    assert (copies(plan), second.sequences[0].cached_tokens) == ([], 4)
    driver.drain()
    assert output(second) == expect([1, 2, 3, 4, 5, 6, 9, 9], 2)
