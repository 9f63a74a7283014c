"""Sequences of one request are preempted and come back as one, with their sharing intact."""

from __future__ import annotations

from collections import Counter

import pytest
from support.engine.scheduler_driver import Driver, all_running, expect, finished, moves, output, results, right

from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.admission import PATIENCE_STEPS, RETRY_STEPS
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus
from pagekv.kvmanager.scheduling.step_plan import CopyKind

OUT, IN = CopyKind.SWAP_OUT, CopyKind.SWAP_IN
WAITING, RUNNING = SeqStatus.WAITING, SeqStatus.RUNNING


def holders(request: LiveRequest) -> list[list[int]]:
    """For each sequence, in how many tables of the request each of its blocks is."""
    count = Counter(block for sequence in request.sequences for block in sequence.block_table)
    return [[count[block] for block in sequence.block_table] for sequence in request.sequences]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_what_a_group_shares_is_copied_out_and_in_once(n: int, prefix_cache: bool) -> None:
    """A prompt of 19 tokens: two blocks that all share, and one of its own for each sequence."""
    driver = Driver(block_size=8, host_blocks=64, preemption="swap", depth=1, prefix_cache=prefix_cache)
    request = driver.submit(list(range(19)), max_tokens=9, n=n)
    all_running(driver, request)
    before, held = holders(request), driver.pool.num_active
    assert before[0][:2] == [n, n]
    driver.scheduler.preempt_all()
    assert driver.pool.num_active == 0
    driver.check()
    (swapped, *others) = [s.swapped for s in request.sequences]
    assert swapped is not None
    assert all(other is not None and other.blocks[:2] == swapped.blocks[:2] for other in others)
    driver.pool.clear_prefix_table()
    computed = driver.executor.computed_tokens
    driver.plan()
    assert holders(request) == before
    assert len(moves(driver, OUT)) == len(set(moves(driver, OUT))) == held
    assert len(moves(driver, IN)) == held
    assert driver.host.num_held == 0
    driver.complete()
    assert driver.executor.computed_tokens == computed + n
    driver.drain()
    assert right(request)
    assert driver.pool.num_active == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("budget", [4, 64])
def test_a_group_that_is_recomputed_computes_its_prompt_once(budget: int, prefix_cache: bool) -> None:
    """With or without the prefix cache, and if the prompt takes several steps: the others wait for it, with blocks."""
    driver = Driver(block_size=4, depth=1, prefix_cache=prefix_cache, max_batch_tokens=budget)
    request = driver.submit(list(range(20)), max_tokens=12, n=3)
    all_running(driver, request)
    before = holders(request)
    driver.scheduler.preempt_all()
    driver.pool.clear_prefix_table()
    computed = driver.executor.computed_tokens
    all_running(driver, request)
    assert [counts[:4] for counts in holders(request)] == [counts[:4] for counts in before]
    driver.drain()
    assert right(request)
    # The four blocks that they share once, and what is behind for each, but for the last token of all.
    assert driver.executor.computed_tokens == computed + 16 + 3 * (32 - 16 - 1)


def test_a_lost_executor_leaves_a_group_that_comes_back_as_one() -> None:
    driver = Driver(block_size=4, prefix_cache=False, max_batch_tokens=8)
    request = driver.submit(list(range(20)), max_tokens=12, n=4)
    all_running(driver, request)
    before = [counts[:4] for counts in holders(request)]
    driver.lose_executor()
    assert {s.state for s in request.sequences} == {WAITING}
    all_running(driver, request)
    assert [counts[:4] for counts in holders(request)] == before
    driver.drain()
    assert right(request)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_fork_that_was_refused_still_shares_the_prompt(prefix_cache: bool) -> None:
    """Its full blocks are held by all, and computed once. A prefix cache has no more, and is not asked."""
    driver = Driver(num_blocks=12, block_size=4, depth=1, prefix_cache=prefix_cache)
    other = driver.submit([50, 51], max_tokens=9)
    driver.step()
    request = driver.submit(list(range(30)), max_tokens=3, n=3)
    driver.step()
    # The prompt takes 8 of 12 blocks and the other request is about to take three: no room for two copies.
    blocks = driver.pool.allocate(2)
    assert blocks is not None
    driver.pool.share(blocks)
    driver.plan()
    # One of them comes in all the same: they have never run, so there is nothing to bring back together.
    assert [s.state for s in request.sequences] == [RUNNING, RUNNING, WAITING]
    driver.pool.free(blocks)
    driver.pool.free(blocks)
    driver.drain()
    assert right(request)
    assert finished(other)
    # The prompts of two requests, however the sequences came in.
    assert driver.scheduler.counters.prompt_tokens == 2 + 30
    # 10 tokens of the other; the prompt, then for each child what is behind its 7 full blocks, and two tokens each.
    assert driver.executor.computed_tokens == 10 + 30 + 2 * 2 + 3 * 2


@pytest.mark.parametrize("running", [1, 2, 3])
def test_a_group_of_more_sequences_than_slots_is_served(running: int) -> None:
    driver = Driver(block_size=4, depth=2, max_running=running)
    group = driver.submit(list(range(6)), max_tokens=5, n=7)
    later = driver.submit([1, 2, 3], max_tokens=5)
    for _ in range(4):
        driver.step()
    driver.scheduler.preempt_all()
    driver.drain()
    assert right(group)
    assert right(later)


def test_a_group_that_waits_is_not_passed_by_later_requests() -> None:
    """The first in the queue that does not fit holds back those behind it, for a while."""
    driver = Driver(num_blocks=12, block_size=4, depth=1, prefix_cache=False)
    group = driver.submit(list(range(8)), max_tokens=4, n=3)
    all_running(driver, group)
    driver.scheduler.preempt_all()
    first = driver.submit(list(range(30)), max_tokens=3, priority=-1)
    later = [driver.submit([i, i], max_tokens=2) for i in range(5)]
    while not finished(first):
        driver.step()
        if not finished(first):
            assert all(s.state is WAITING for request in [group, *later] for s in request.sequences)
    driver.step()
    assert all(s.state is not WAITING for s in group.sequences)
    driver.drain()
    assert right(group)


def steps_until(driver: Driver, *requests: LiveRequest) -> list[int]:
    """For each request, after how many steps it is finished. Drains."""
    done = [0] * len(requests)
    for step in range(1, 2000):
        if not driver.step():
            return done
        done = [at or (step if finished(request) else 0) for at, request in zip(done, requests, strict=True)]
    raise AssertionError("not drained")


@pytest.mark.parametrize(("n", "streams"), [(8, 2), (9, 1), (12, 1)])
def test_children_that_find_no_slots_come_one_by_one_beside_a_long_stream(n: int, streams: int) -> None:
    """Sequences that have never run need not wait for each other, and nothing behind them waits for the stream."""
    driver = Driver(num_blocks=400, depth=1, max_running=8)
    long = [driver.submit([1 + i] * 10, max_tokens=90) for i in range(streams)]
    driver.step()
    group = driver.submit([20] * 10, max_tokens=10, n=n)
    later = [driver.submit([30 + i] * 10, max_tokens=10) for i in range(10)]
    first, *others = steps_until(driver, group, *later, *long)
    assert first <= 31
    assert max(others[:10]) <= 42
    assert right(group)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_group_that_does_not_fit_beside_a_long_stream_comes_one_by_one(prefix_cache: bool) -> None:
    """The blocks suffice for one sequence after the other. Only for some steps the group waits until all fit."""
    driver = Driver(num_blocks=80, depth=1, max_running=64, prefix_cache=prefix_cache)
    long = driver.submit([1] * 10, max_tokens=150)
    driver.step()
    group = driver.submit([20] * 8, max_tokens=24, n=16)
    for _ in range(6):
        driver.step()
    later = [driver.submit([30 + i] * 10, max_tokens=10) for i in range(5)]
    first, *others, last = steps_until(driver, group, *later, long)
    assert group.preemptions
    assert first <= 60
    assert max(others) <= 60 < last
    assert right(group)


def test_a_head_without_room_is_tried_again_for_what_others_published_meanwhile() -> None:
    """Nothing becomes free: it hits blocks of another tenant's prompt, which were counted when it did not fit."""
    driver = Driver(num_blocks=64, depth=1, max_batch_tokens=8)
    # So little weight that nobody is preempted for it.
    a, b = Tenant("a", 1), Tenant("b", 2)
    driver.scheduler.set_tenants({a.number: 1.0, b.number: 0.01}, {})
    stream = driver.submit([5], max_tokens=60, tenant=a)
    driver.step()
    long = driver.submit([1] * 80, max_tokens=40, tenant=a)
    driver.step()
    head = driver.submit([1] * 80 + [2] * 100, max_tokens=1, tenant=b)
    tried = 0
    while head.sequences[0].state is WAITING:
        driver.step()
        tried += 1
    assert tried == RETRY_STEPS + 1
    assert not any(request.preemptions or finished(request) for request in (stream, long))
    driver.drain()
    assert all(map(right, (stream, long, head)))


def test_a_group_that_came_back_one_by_one_goes_on_so_and_shares() -> None:
    """A stream leaves nine blocks of 20 and then fewer; eight sequences, which share two, want ten and then more."""
    driver = Driver(num_blocks=20, depth=1, prefix_cache=False)
    group = driver.submit(list(range(10)), max_tokens=9, n=8)
    all_running(driver, group)
    driver.scheduler.preempt_all()
    first = driver.submit([50] * 41, max_tokens=30, priority=-1)
    while driver.pool.num_active < 8:
        driver.step()
    waited = 0
    while not group.apart:
        assert all(s.state is WAITING for s in group.sequences)
        driver.step()
        waited += 1
    # The first of them was the step in which the stream had got its blocks.
    assert waited == PATIENCE_STEPS - 1
    states = [s.state for s in group.sequences]
    assert states == [RUNNING] * states.count(RUNNING) + [WAITING] * states.count(WAITING)
    assert 1 < states.count(RUNNING) < 8
    here = states.count(RUNNING)
    assert [counts[:2] for counts in holders(group)[:here]] == [[here, here]] * here
    driver.scheduler.finish(first.sequences[0])
    driver.drain()
    assert right(group)


def test_beams_need_one_slot_beside_a_long_stream() -> None:
    """Beams leave the executor after every step, so they take turns."""
    driver = Driver(num_blocks=200, depth=1, max_running=4)
    long = driver.submit([1] * 10, max_tokens=200)
    search = driver.submit(list(range(9)), max_tokens=12, n=4, beam_width=4)
    for _ in range(12):
        driver.step()
    driver.scheduler.preemption.preempt(search.sequences[0])
    assert len(search.sequences) == 4
    first, last = steps_until(driver, search, long)
    assert 0 < first < 100 < last
    straight = Driver(num_blocks=128)
    undisturbed = straight.submit(list(range(9)), max_tokens=12, n=4, beam_width=4)
    straight.drain()
    assert results(search) == results(undisturbed)


@pytest.mark.parametrize("gone", [0, 1])
def test_another_takes_over_what_one_was_computing_for_all(gone: int) -> None:
    """The sequence that recomputes the shared blocks is stopped half way: the others neither wait for it for ever nor
    compute the same slot twice.
    """
    driver = Driver(block_size=4, depth=1, prefix_cache=False, max_batch_tokens=6)
    group = driver.submit(list(range(40)), max_tokens=6, n=4)
    all_running(driver, group)
    driver.scheduler.preempt_all()
    driver.step()
    driver.step()
    assert [s.seq_id >= 0 for s in group.sequences] == [True, False, False, False]
    computed = driver.executor.computed_tokens
    driver.scheduler.finish(group.sequences[gone])
    driver.check()
    if gone == 0:
        driver.scheduler.finish(group.sequences[2])
    driver.drain()
    wanted = expect(group.command.prompt_ids, 6)
    left = [1, 3] if gone == 0 else [0, 2, 3]
    assert all(output(group, index) == wanted for index in left)
    # The sequence that left computed 12 of the 36 shared positions, or all of them.
    assert driver.executor.computed_tokens - computed < 36 - 12 + len(left) * (4 + 6) + 1
    assert driver.pool.num_active == 0


def test_aborting_a_group_frees_what_its_members_keep_together() -> None:
    driver = Driver(block_size=4, host_blocks=64, preemption="swap", depth=1, prefix_cache=False)
    group = driver.submit(list(range(11)), max_tokens=9, n=3)
    all_running(driver, group)
    driver.scheduler.preempt_all()
    held = driver.host.num_held
    driver.scheduler.finish(group.sequences[0])
    driver.check()
    # The two shared blocks stay for the other two.
    assert 0 < held - driver.host.num_held <= 2
    driver.abort(group)
    assert driver.host.num_held == 0
    driver.drain()
    driver.check()


def test_a_host_pool_that_has_room_for_a_part_of_a_group() -> None:
    """Kept blocks come back, the rest is computed again."""
    for host_blocks in range(1, 8):
        driver = Driver(
            num_blocks=16, block_size=4, host_blocks=host_blocks, preemption="swap", depth=1, prefix_cache=False
        )
        group = driver.submit(list(range(11)), max_tokens=9, n=3)
        all_running(driver, group)
        driver.scheduler.preempt_all()
        assert 0 < driver.host.num_held <= host_blocks
        driver.drain()
        assert right(group)
        assert driver.host.num_held == 0


@pytest.mark.parametrize("fork_sharing", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_beams_come_back_with_what_they_had_in_common(prefix_cache: bool, fork_sharing: bool) -> None:
    """Beams parted at different places, and share up to there again."""
    driver = Driver(
        block_size=2,
        num_blocks=128,
        host_blocks=128,
        preemption="swap",
        depth=1,
        prefix_cache=prefix_cache,
        fork_sharing=fork_sharing,
    )
    request = driver.submit(list(range(9)), max_tokens=12, n=4, beam_width=4)
    for _ in range(8):
        driver.step()
    assert len(request.sequences) == 4
    before, copied = holders(request), len(moves(driver, OUT))
    held = driver.pool.num_active
    driver.scheduler.preempt_all()
    driver.plan()
    assert len(moves(driver, OUT)) - copied <= held
    driver.check()
    assert {s.state for s in request.sequences} <= {RUNNING, SeqStatus.DRAINING}
    if fork_sharing:
        # Where a beam parted in the middle of a block it may share that one again no more than before.
        full = [len(s.token_ids) // 2 - 1 for s in request.sequences]
        now = holders(request)
        assert [now[i][: full[i]] for i in range(4)] == [before[i][: full[i]] for i in range(4)]
    driver.drain()
    straight = Driver(block_size=2, num_blocks=128)
    undisturbed = straight.submit(list(range(9)), max_tokens=12, n=4, beam_width=4)
    straight.drain()
    assert results(request) == results(undisturbed)


def test_a_group_that_may_not_be_cached_shares_all_the_same() -> None:
    driver = Driver(block_size=8, host_blocks=64, preemption="swap", depth=1)
    hidden = CacheIdentity(read=False, write=False)
    request = driver.submit(list(range(19)), max_tokens=9, n=3, identity=hidden)
    all_running(driver, request)
    before, held = holders(request), driver.pool.num_active
    driver.scheduler.preempt_all()
    driver.plan()
    assert holders(request) == before
    assert len(moves(driver, OUT)) == len(moves(driver, IN)) == held
    driver.drain()
    assert right(request)


def test_a_group_that_looks_nothing_up_and_shares_publishes_what_follows() -> None:
    """Shared blocks were not found by digests, and generated blocks behind them go into the table all the same."""
    driver = Driver(num_blocks=12, block_size=2, depth=1, max_batch_tokens=3)
    group = driver.submit(list(range(5)), max_tokens=7, n=4, identity=CacheIdentity(read=False))
    driver.drain()
    assert right(group)
    assert driver.pool.num_published >= 5
