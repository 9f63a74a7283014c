import random
import zlib

import pytest
from fake_executor import expected_output
from scheduler_driver import VOCAB, Driver, copies, finished, output, streamed

from pagekv.kvmanager import block_hash, block_tables
from pagekv.kvmanager.request import CacheIdentity, FinishReason
from pagekv.kvmanager.sequence import SequenceState


def expect(prompt: list[int], max_tokens: int, ends: tuple[int, ...] = ()) -> list[int]:
    return expected_output(prompt, max_tokens, VOCAB, ends)


def test_one_request_streams_its_tokens_and_gives_every_block_back() -> None:
    driver = Driver()
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=6)
    driver.drain()
    assert output(request) == expect([1, 2, 3, 4, 5], 6)
    assert streamed(request) == (expect([1, 2, 3, 4, 5], 6), FinishReason.LENGTH)
    assert driver.pool.num_active == 0
    assert driver.executor.live == {}


def test_a_single_token_of_output() -> None:
    driver = Driver()
    request = driver.submit([1, 2, 3, 4], max_tokens=1)
    driver.drain()
    assert output(request) == expect([1, 2, 3, 4], 1)
    assert driver.executor.computed_tokens == 4


def test_blocks_grow_on_demand_one_at_a_time() -> None:
    """CHECKLIST C10, D4: blocks held are ceil(tokens / block size) at every step."""
    driver = Driver(depth=1)
    request = driver.submit([1, 2, 3], max_tokens=12)
    sequence = request.sequences[0]
    while driver.plan() is not None:
        assert len(sequence.block_table) == -(-sequence.num_computed // 4)
        driver.complete()
        driver.check()
    assert finished(request)


def test_the_next_step_is_planned_while_one_is_in_flight() -> None:
    driver = Driver(depth=2)
    request = driver.submit([1, 2, 3, 4, 5], max_tokens=4)
    assert driver.plan() is not None
    ahead = driver.plan()
    assert ahead is not None
    assert ahead.num_tokens == 1
    assert (request.sequences[0].num_pending, len(request.sequences[0].token_ids)) == (2, 5)
    driver.drain()
    assert output(request) == expect([1, 2, 3, 4, 5], 4)


def test_nothing_is_computed_past_max_tokens() -> None:
    driver = Driver(depth=2)
    driver.submit([1, 2, 3], max_tokens=5)
    driver.drain()
    assert driver.executor.computed_tokens == 3 + 5 - 1


def test_one_token_past_a_stop_is_computed_and_dropped() -> None:
    prompt = [1, 2, 3]
    stop = expect(prompt, 4)[3]
    wanted = expect(prompt, 20, (stop,))
    driver = Driver(depth=2)
    request = driver.submit(prompt, max_tokens=20, stop_token_ids=(stop,))
    driver.drain()
    assert streamed(request) == (wanted, FinishReason.STOP)
    assert driver.executor.computed_tokens == 3 + len(wanted)
    assert driver.pool.num_active == 0


def test_stop_tokens_are_ignored_before_min_tokens() -> None:
    prompt = [4, 5, 6]
    stop = expect(prompt, 2)[1]
    driver = Driver()
    request = driver.submit(prompt, max_tokens=6, stop_token_ids=(stop,), min_tokens=3)
    driver.drain()
    tokens, _ = streamed(request)
    assert len(tokens) >= 3


def test_chunked_prefill_stays_in_the_budget_beside_decodes() -> None:
    driver = Driver(max_batch_tokens=8, depth=1)
    short = driver.submit([1, 2], max_tokens=12)
    driver.step()
    long = driver.submit(list(range(30)), max_tokens=3)
    sizes = []
    while (plan := driver.plan()) is not None:
        sizes.append(plan.num_tokens)
        driver.complete()
    assert max(sizes) == 8
    assert driver.executor.largest_step == 8
    assert output(short) == expect([1, 2], 12)
    assert output(long) == expect(list(range(30)), 3)


def test_decodes_go_first_so_a_long_prompt_never_stalls_them() -> None:
    driver = Driver(num_blocks=128, max_batch_tokens=4, depth=1)
    request = driver.submit([1, 2], max_tokens=20)
    driver.step()
    driver.submit([9] * 200, max_tokens=1)
    for produced in range(2, 12):
        driver.step()
        assert len(output(request)) == produced


def test_second_request_hits_what_the_first_left() -> None:
    driver = Driver()
    prompt = list(range(20))
    first = driver.submit(prompt, max_tokens=4)
    driver.drain()
    before = driver.executor.computed_tokens
    second = driver.submit(prompt, max_tokens=4)
    driver.drain()
    assert first.sequences[0].cached_tokens == 0
    # All five blocks are cached, but one token must be computed, so four are used.
    assert second.sequences[0].cached_tokens == 16
    assert driver.executor.computed_tokens - before == 4 + 3
    assert output(first) == output(second) == expect(prompt, 4)


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    """CHECKLIST F17, Z15."""
    driver = Driver()
    prompt = list(range(6))
    first = driver.submit(prompt, max_tokens=11)
    driver.drain()
    turn = [*prompt, *output(first), 50, 51]
    second = driver.submit(turn, max_tokens=2)
    driver.drain()
    assert second.sequences[0].cached_tokens == 16
    assert output(second) == expect(turn, 2)


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


def test_requests_that_arrive_at_once_share_a_prefix_computed_once() -> None:
    """The blocks of a chunk can be hit by the next admission of the same step."""
    driver = Driver(num_blocks=400, block_size=16, max_batch_tokens=2048, max_running=64, vocab=VOCAB)
    prefix = [i % 90 for i in range(512)]
    prompts = [[*prefix, *[(r * 7 + i) % 90 for i in range(32)]] for r in range(32)]
    requests = [driver.submit(prompt, max_tokens=1) for prompt in prompts]
    driver.drain()
    assert [r.sequences[0].cached_tokens for r in requests] == [0] + [512] * 31
    assert driver.executor.computed_tokens == 512 + 32 * 32


def test_no_hits_across_namespaces_or_without_the_cache() -> None:
    prompt = list(range(16))
    for other in (CacheIdentity(namespace="b"), CacheIdentity(adapter_id="b"), CacheIdentity(read=False)):
        driver = Driver()
        driver.submit(prompt, max_tokens=1)
        driver.drain()
        second = driver.submit(prompt, max_tokens=1, identity=other)
        driver.drain()
        assert second.sequences[0].cached_tokens == 0
    driver = Driver()
    driver.submit(prompt, max_tokens=1, identity=CacheIdentity(write=False))
    driver.drain()
    assert driver.pool.num_published == 0
    driver = Driver(prefix_cache=False)
    driver.submit(prompt, max_tokens=1)
    driver.drain()
    assert driver.pool.num_published == 0


def test_preemption_takes_the_latest_and_loses_nothing() -> None:
    driver = Driver(num_blocks=8)
    prompts = [[r * 10 + i for i in range(8)] for r in range(4)]
    requests = [driver.submit(prompt, max_tokens=12) for prompt in prompts]
    driver.drain()
    assert [output(request) for request in requests] == [expect(prompt, 12) for prompt in prompts]
    assert driver.scheduler.counters.preemptions > 0
    assert requests[0].sequences[0].preemptions == 0
    assert driver.pool.num_active == 0


def test_higher_priority_runs_first_and_is_preempted_last() -> None:
    driver = Driver(num_blocks=8, max_running=16)
    low = driver.submit([1] * 8, max_tokens=12, priority=5)
    high = driver.submit([2] * 8, max_tokens=12, priority=-5)
    driver.step()
    assert driver.scheduler.running[0] is high.sequences[0]
    driver.drain()
    assert high.sequences[0].preemptions == 0
    assert low.sequences[0].preemptions > 0
    assert output(low) == expect([1] * 8, 12)


def test_a_large_request_at_the_head_is_not_passed() -> None:
    driver = Driver(num_blocks=8, depth=1)
    driver.submit([1] * 16, max_tokens=8)
    driver.step()
    large = driver.submit([2] * 20, max_tokens=4)
    small = driver.submit([3], max_tokens=1)
    driver.step()
    assert (large.sequences[0].state, small.sequences[0].state) == (SequenceState.WAITING, SequenceState.WAITING)
    driver.drain()
    assert finished(large)
    assert finished(small)


def test_the_watermark_keeps_room_for_running_decodes() -> None:
    tight = Driver(num_blocks=10, watermark=0.3)
    tight.submit([1] * 16, max_tokens=8)
    tight.step()
    second = tight.submit([2] * 16, max_tokens=1)
    tight.step()
    assert second.sequences[0].state is SequenceState.WAITING
    tight.drain()
    assert tight.scheduler.counters.preemptions == 0


def test_the_watermark_does_not_lock_out_a_request_that_is_alone() -> None:
    driver = Driver(num_blocks=10, watermark=0.3)
    request = driver.submit([1] * 36, max_tokens=2)
    driver.drain()
    assert output(request) == expect([1] * 36, 2)


def test_abort_in_every_state_frees_its_blocks_at_once() -> None:
    driver = Driver(num_blocks=8, max_running=1)
    running = driver.submit([1] * 8, max_tokens=20)
    waiting = driver.submit([2] * 8, max_tokens=20)
    driver.step()
    driver.plan()
    driver.abort(waiting)
    driver.abort(running)
    assert driver.pool.num_active == 0
    driver.check()
    third = driver.submit([3] * 8, max_tokens=3)
    driver.drain()
    assert output(third) == expect([3] * 8, 3)
    assert driver.executor.live == {}


def test_requests_that_leave_the_middle_of_the_queue_leave_no_trace() -> None:
    """Others always come first, so their entries would never surface."""
    driver = Driver(num_blocks=8, max_running=1)
    driver.submit([1] * 8, max_tokens=8)
    driver.step()
    driver.submit([2] * 8, max_tokens=1, priority=-1)
    for _ in range(1000):
        driver.abort(driver.submit([3] * 8, priority=1))
    assert len(driver.scheduler.waiting) == 1
    assert len(driver.scheduler.waiting._heap) < 100
    driver.drain()


@pytest.mark.parametrize("length", [8, 9, 10, 12])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_n_sequences_share_their_prompt_and_copy_the_block_they_write(length: int, prefix_cache: bool) -> None:
    """CHECKLIST J1, J3, J6: blocks are prompt + n * new + one copy for each but the first, with or without a prefix
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
def test_a_hash_with_few_values_costs_hits_and_never_an_output(
    values: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CHECKLIST E9: with `values` digests in all, everything collides all the time."""

    class Weak:
        def __init__(self, data: bytes) -> None:
            self.value = zlib.crc32(data) % values

        def digest(self) -> bytes:
            return bytes([self.value]) * 32

    monkeypatch.setattr(block_hash, "sha256", Weak)
    monkeypatch.setattr(block_tables, "sha256", Weak)
    chance = random.Random(seed)
    driver = Driver(num_blocks=24, block_size=2, max_running=4, partial_hits=bool(seed % 2), vocab=3)
    prompts = []
    for _ in range(60):
        prompts.append([chance.randrange(3) for _ in range(chance.randrange(1, 12))])
        driver.submit(prompts[-1], max_tokens=chance.randrange(1, 8))
        for _ in range(chance.randrange(3)):
            driver.step()
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
    """Its copies are admitted like any newcomer: the others wait in the queue while a decode may need what is free."""
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
    """CHECKLIST J4: of a block that shares three of four tokens, three are copied and the fourth is computed."""
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


def test_a_copy_that_would_take_one_block_too_many_is_done_without() -> None:
    """Its source must not be given away before it is copied, and here it has to be: every block is needed."""
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


def test_a_waiting_request_is_passed_by_a_bounded_number() -> None:
    """No starvation: with an aging of 3 fewer than three later requests of the next better priority go first."""
    driver = Driver(max_running=1, priority_aging=3)
    driver.submit([1], max_tokens=4)
    driver.step()
    low = driver.submit([2], priority=1, max_tokens=1)
    passed = 0
    while low.sequences[0].state is not SequenceState.FINISHED:
        driver.submit([3], max_tokens=1)
        driver.step()
        passed = sum(finished(request) for request in driver.requests[2:])
    assert passed == 2


def test_strict_priorities_can_be_asked_for() -> None:
    driver = Driver(max_running=1, priority_aging=0)
    low = driver.submit([2], priority=1, max_tokens=1)
    for _ in range(20):
        driver.submit([3], max_tokens=1)
        driver.step()
    assert not finished(low)
    driver.drain()
    assert finished(low)


def test_resumed_tokens_count_as_output() -> None:
    prompt = [1, 2, 3]
    whole = expect(prompt, 8)
    driver = Driver()
    request = driver.submit([*prompt, *whole[:5]], max_tokens=8, resumed=5)
    driver.drain()
    assert output(request) == whole[5:]
    assert request.sequences[0].num_output == 8


def test_cached_tokens_count_the_prompt_alone() -> None:
    driver = Driver()
    prompt = list(range(6))
    whole = expect(prompt, 11)
    driver.submit(prompt, max_tokens=11)
    driver.drain()
    resumed = driver.submit([*prompt, *whole[:10]], max_tokens=11, resumed=10)
    driver.drain()
    assert driver.executor.computed_tokens == 6 + 10 + 4
    assert resumed.sequences[0].cached_tokens == 6
    assert (driver.scheduler.counters.prompt_tokens, driver.scheduler.counters.cached_tokens) == (12, 6)
    assert output(resumed) == whole[10:]


def test_a_lost_executor_changes_no_token() -> None:
    driver = Driver(num_blocks=16)
    prompts = [[r * 5 + i for i in range(7)] for r in range(5)]
    requests = [driver.submit(prompt, max_tokens=9) for prompt in prompts]
    for steps in (1, 2, 4):
        for _ in range(steps):
            driver.step()
        driver.plan()
        driver.lose_executor()
        driver.check()
    driver.drain()
    for request, prompt in zip(requests, prompts, strict=True):
        assert streamed(request) == (expect(prompt, 9), FinishReason.LENGTH)


def test_the_same_history_leads_to_the_same_decisions() -> None:
    def decisions() -> list[tuple[list[int], list[int], list[int], int]]:
        driver = Driver(num_blocks=12, max_batch_tokens=10)
        for r in range(8):
            driver.submit([r % 3] * (5 + r), max_tokens=6, priority=r % 2)
            driver.step()
        driver.drain()
        return [(p.finished, p.append_blocks, p.scheduled_tokens, p.num_tokens) for p in driver.plans]

    assert decisions() == decisions()
