from support.engine.fake_executor import expected_output
from support.engine.scheduler_driver import VOCAB, Driver, finished, output, streamed

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.scheduling.sequence import SeqStatus


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
    assert (large.sequences[0].state, small.sequences[0].state) == (SeqStatus.WAITING, SeqStatus.WAITING)
    driver.drain()
    assert finished(large)
    assert finished(small)


def test_the_watermark_keeps_room_for_running_decodes() -> None:
    tight = Driver(num_blocks=10, watermark=0.3)
    tight.submit([1] * 16, max_tokens=8)
    tight.step()
    second = tight.submit([2] * 16, max_tokens=1)
    tight.step()
    assert second.sequences[0].state is SeqStatus.WAITING
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


def test_a_waiting_request_is_passed_by_a_bounded_number() -> None:
    """No starvation: with an aging of 3 fewer than three later requests of the next better priority go first."""
    driver = Driver(max_running=1, priority_aging=3)
    driver.submit([1], max_tokens=4)
    driver.step()
    low = driver.submit([2], priority=1, max_tokens=1)
    passed = 0
    while low.sequences[0].state is not SeqStatus.FINISHED:
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
