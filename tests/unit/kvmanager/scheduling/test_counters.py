"""The scheduler's counters."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver, expect, output


def test_every_counter_counts_what_it_says() -> None:
    driver = Driver(num_blocks=9, block_size=4, depth=1, host_blocks=32, preemption="swap", write_back=True)
    requests = [driver.submit([9 * i + j for j in range(9)], max_tokens=12) for i in range(3)]
    driver.drain()
    counters = driver.scheduler.counters
    assert (counters.prompt_tokens, counters.generated_tokens) == (27, 36)
    assert counters.preemptions == sum(s.preemptions for r in requests for s in r.sequences) > 0
    assert counters.swap_preemptions == counters.preemptions
    copied = sum(len(plan.copies) for plan in driver.plans)
    assert counters.swapped_out + counters.swapped_in + counters.written_back == copied
    assert min(counters.swapped_out, counters.swapped_in) > 0


def test_of_three_preemptions_two_found_room_in_the_host_pool() -> None:
    """The counters and what the next plan says, of each sequence."""
    driver = Driver(num_blocks=16, block_size=4, depth=1, host_blocks=4, preemption="swap")
    requests = [driver.submit([30 * i + j for j in range(7)], max_tokens=6) for i in range(3)]
    driver.step()
    for request in requests:
        driver.scheduler.preemption.preempt(request.sequences[0])
    counters = driver.scheduler.counters
    assert (counters.preemptions, counters.swap_preemptions) == (3, 2)
    plan = driver.plan()
    assert plan is not None
    assert [(sequence.request, kept) for sequence, kept in plan.preempted] == list(
        zip(requests, [True, True, False], strict=True)
    )
    driver.drain()


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
    driver.submit(prompt, max_tokens=1)
    driver.drain()
    assert (driver.scheduler.counters.prompt_tokens, driver.scheduler.counters.cached_tokens) == (18, 6 + 4)
