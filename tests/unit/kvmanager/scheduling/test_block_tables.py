"""Which blocks sequences hold, and how many: golden values, driven through the scheduler."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
from support.engine.scheduler_driver import Driver, expect, finished, output

from pagekv.kvmanager.engine.statistics import utilization
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus


def table(request: LiveRequest, index: int = 0) -> list[int]:
    return list(request.sequences[index].block_table)


def slot(request: LiveRequest, position: int, block_size: int) -> tuple[int, int]:
    """Where keys and values of a position are: (physical block, offset)."""
    block, offset = divmod(position, block_size)
    return table(request)[block], offset


@pytest.mark.parametrize(
    ("tokens", "blocks", "unused"), [(505, 32, 7), (1000, 63, 8), (4096, 256, 0), (2048, 128, 0), (1, 1, 15)]
)
def test_only_the_last_block_has_unused_slots(tokens: int, blocks: int, unused: int) -> None:
    """505 live tokens take 512 slots, 1000 take 1008, 4096 take 4096; 2048 are 128 blocks."""
    driver = Driver(num_blocks=256, block_size=16, max_batch_tokens=4096)
    request = driver.submit([i % 90 for i in range(tokens)], max_tokens=1)
    driver.plan()
    assert len(table(request)) == blocks
    assert driver.pool.num_active == blocks
    assert utilization(driver.scheduler) == pytest.approx(tokens / (tokens + unused))


def test_a_sequence_fills_its_blocks_in_order() -> None:
    """Position p lives in block_table[p // 4] at offset p % 4; block i spans 4i to 4i + 3."""
    driver = Driver(block_size=4)
    prompt = list(range(11))
    request = driver.submit(prompt, max_tokens=1)
    driver.plan()
    where = {position: slot(request, position, 4) for position in range(11)}
    driver.complete()
    for position, place in where.items():
        assert driver.executor.slots[place] == ("", "", [], prompt[: position + 1])


def test_blocks_come_from_wherever_they_are_free() -> None:
    """Equal blocks, so any of them will do; there are no gaps to be too small."""
    driver = Driver(num_blocks=8, block_size=4, prefix_cache=False, depth=1)
    first, second, third = (driver.submit([t] * 6, max_tokens=3) for t in (1, 2, 3))
    driver.step()
    assert (table(first), table(second), table(third)) == ([0, 1], [2, 3], [4, 5])
    driver.abort(first)
    driver.abort(third)
    assert driver.pool.num_free == 6
    scattered = driver.submit([4] * 21, max_tokens=3)
    driver.plan()
    assert table(scattered) == [6, 7, 1, 0, 5, 4]
    assert driver.pool.num_free == 0
    driver.drain()
    assert output(scattered) == expect([4] * 21, 3)


def test_the_queue_takes_turns_where_a_stack_would_not() -> None:
    """Blocks of 4, 20 of them; A has 5 tokens, B one. A stack gives A blocks 19 and 18, B 17 and,
    once A is gone, 18 and 19 to whoever is next; the queue gives 0, 1 and 2, and A's come last. Free are 19 then.
    """
    driver = Driver(num_blocks=20, block_size=4)
    a = driver.submit([1, 2, 3, 4, 5], max_tokens=1)
    b = driver.submit([9], max_tokens=8)
    driver.plan()
    assert [slot(a, position, 4) for position in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert slot(b, 0, 4) == (2, 0)
    driver.complete()
    assert finished(a)
    assert driver.pool.num_free == 19
    c = driver.submit([8] * 8, max_tokens=1)
    driver.plan()
    assert table(c) == [3, 4]


def test_nothing_is_held_before_the_first_token_is_scheduled() -> None:
    """An empty sequence wastes no block. D4: nor does the fifth token take one before its turn."""
    driver = Driver(block_size=4, depth=1, max_running=1)
    running = driver.submit([1, 2, 3, 4], max_tokens=3)
    waiting = driver.submit([5, 6, 7, 8], max_tokens=3)
    driver.plan()
    assert (len(table(running)), len(table(waiting))) == (1, 0)
    driver.complete()
    assert len(table(running)) == 1
    plan = driver.plan()
    assert plan is not None
    assert list(plan.append_blocks) == [table(running)[1]]
    assert driver.pool.num_active == 2


def test_a_growing_block_belongs_to_its_sequence_alone() -> None:
    """One holder, and no identity before it is full."""
    driver = Driver(block_size=4, depth=1)
    request = driver.submit([1, 2], max_tokens=4)
    driver.step()
    (block,) = table(request)
    for published in (0, 0, 1):
        assert (driver.pool.ref_count(block), driver.pool.num_published) == (1, published)
        driver.step()


def test_blocks_of_one_that_ends_are_the_next_ones_in_the_same_step() -> None:
    """Nothing lies idle between the end of a request and the next step."""
    driver = Driver(num_blocks=2, block_size=4, depth=1)
    first = driver.submit([1] * 8, max_tokens=1)
    second = driver.submit([2] * 8, max_tokens=1)
    driver.step()
    assert finished(first)
    assert second.sequences[0].state is SeqStatus.WAITING
    driver.plan()
    assert sorted(table(second)) == [0, 1]
    driver.drain()
    assert (driver.pool.num_free, driver.pool.num_active) == (2, 0)


def test_a_late_arrival_joins_the_batch() -> None:
    """The first token comes long before the running request's last, in the very next step."""
    driver = Driver(depth=1)
    long = driver.submit([1] * 4, max_tokens=40)
    for _ in range(5):
        driver.step()
    late = driver.submit([2] * 4, max_tokens=2)
    driver.step()
    assert (len(output(late)), len(output(long))) == (1, 6)


def test_more_is_promised_than_there_is() -> None:
    """Four requests that may grow to five blocks each run on eight, 2.5 times what there is. The requests
    preempt each other, all end well, and every block is back.
    """
    driver = Driver(num_blocks=8, block_size=4)
    prompts = [[r * 10 + i for i in range(8)] for r in range(4)]
    requests = [driver.submit(prompt, max_tokens=12) for prompt in prompts]
    driver.plan()
    assert len(driver.scheduler.running) == 4
    while not driver.scheduler.counters.preemptions:
        driver.step()
    # All four need a block in one step, which the last two give to the others.
    assert [request.sequences[0].preemptions for request in requests] == [0, 0, 1, 1]
    driver.drain()
    assert [output(request) for request in requests] == [expect(prompt, 12) for prompt in prompts]
    assert requests[0].sequences[0].preemptions == 0
    assert (driver.pool.num_free, driver.pool.num_active) == (8, 0)


def test_a_preempted_request_is_recomputed_as_one_prompt() -> None:
    """4 tokens of prompt and 4 generated come back as one prefill of 8, and then it decodes on.
    Its blocks went back at once.
    """
    driver = Driver(num_blocks=4, block_size=4, depth=1, prefix_cache=False)
    front = driver.submit([1] * 5, max_tokens=9)
    victim = driver.submit([2] * 4, max_tokens=9)
    while not victim.sequences[0].preemptions:
        driver.step()
    tokens = [*victim.command.prompt_ids, *output(victim)]
    assert (len(tokens), table(victim)) == (8, [])
    assert driver.pool.num_active == len(table(front)) == 3
    while not driver.plans[-1].new or driver.plans[-1].new[0].sequence is not victim.sequences[0]:
        driver.step()
    again = driver.plans[-1]
    assert list(again.new[0].token_ids) == tokens
    assert (again.new[0].computed_tokens, again.num_tokens) == (0, 8)
    driver.drain()
    assert output(victim) == expect([2] * 4, 9)


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """Blocks that nothing needed meanwhile are still cached, and only the rest is recomputed."""
    driver = Driver(num_blocks=6, block_size=4, depth=1)
    driver.submit([1] * 4, max_tokens=9)
    victim = driver.submit([2] * 12, max_tokens=9)
    while not victim.sequences[0].preemptions:
        driver.step()
    while not driver.plans[-1].new or driver.plans[-1].new[0].sequence is not victim.sequences[0]:
        driver.step()
    assert driver.plans[-1].new[0].computed_tokens >= 8
    driver.drain()
    assert output(victim) == expect([2] * 12, 9)


def reachable(root: object) -> list[Any]:
    """Every object that can be reached from one, itself included, without classes and modules."""
    seen: dict[int, Any] = {}
    pending = [root]
    while pending:
        thing = pending.pop()
        if id(thing) not in seen and not isinstance(thing, type) and not hasattr(thing, "__globals__"):
            seen[id(thing)] = thing
            pending += gc.get_referents(thing)
    return list(seen.values())


def test_neither_pool_nor_scheduler_grows_with_requests() -> None:
    """A fixed pool. Full of cached blocks once, both are as large after twenty times as many requests."""
    driver = Driver(num_blocks=64, block_size=4)

    def serve(requests: range) -> int:
        for number in requests:
            driver.submit([number, 1, 2, 3, *[number] * 9], max_tokens=3)
            driver.drain()
            driver.requests.clear()
            driver.plans.clear()
        assert driver.pool.num_cached_free >= 48
        return sum(sys.getsizeof(thing) for thing in reachable(driver.scheduler))

    once = serve(range(30))
    assert serve(range(30, 630)) <= 1.02 * once
