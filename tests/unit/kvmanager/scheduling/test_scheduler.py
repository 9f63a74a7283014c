import pytest
from support.engine.scheduler_driver import Driver, expect, finished, output, streamed

from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.scheduling.sequence import SeqStatus


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


@pytest.mark.parametrize("length", range(1, 9))
def test_blocks_grow_on_demand_one_at_a_time(length: int) -> None:
    """Blocks held are ceil(tokens / block size) at every step."""
    driver = Driver(depth=1)
    request = driver.submit(list(range(length)), max_tokens=12)
    sequence = request.sequences[0]
    while driver.plan() is not None:
        assert len(sequence.block_table) == -(-sequence.num_computed // 4)
        driver.complete()
        driver.check()
    assert finished(request)


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
    """And once, though it is called twice."""
    driver = Driver(num_blocks=8, max_running=1)
    running = driver.submit([1] * 8, max_tokens=20)
    waiting = driver.submit([2] * 8, max_tokens=20)
    driver.step()
    driver.plan()
    for _ in range(2):
        driver.abort(waiting)
        driver.abort(running)
        driver.check()
        assert (driver.pool.num_active, driver.pool.num_free, driver.scheduler.running) == (0, 8, [])
    third = driver.submit([3] * 8, max_tokens=3)
    driver.drain()
    assert output(third) == expect([3] * 8, 3)
    assert driver.executor.live == {}


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
