"""A step stays in its token budget: decodes first, then as much of the prompts as there is room for."""

from __future__ import annotations

from support.engine.scheduler_driver import Driver, expect, output

from pagekv.kvmanager.request.tenant import Tenant


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


def test_a_sequence_that_finds_no_room_pauses() -> None:
    driver = Driver(max_batch_tokens=2, depth=1)
    first = driver.submit([1], max_tokens=9)
    second = driver.submit([2], max_tokens=9)
    driver.step()
    third = driver.submit([3] * 4, max_tokens=1)
    plan = driver.plan()
    assert plan is not None
    # Both decodes fill the step, and nothing of the third is planned.
    assert (plan.num_tokens, plan.scheduled_seq_ids, plan.new) == (2, [], [])
    assert plan.sampling.tolist() == [s.seq_id for request in (first, second) for s in request.sequences]
    driver.complete()
    driver.scheduler.finish(second.sequences[0])
    plan = driver.plan()
    assert plan is not None
    # One token of the third beside the one decode; exactly one token needs no entry.
    assert (plan.num_tokens, plan.scheduled_seq_ids, len(plan.new)) == (2, [], 1)
    late = driver.submit([4], max_tokens=1, priority=-1)
    driver.complete()
    driver.drain()
    assert output(third) == expect([3] * 4, 1)
    assert output(late) == expect([4], 1)


def test_behind_the_prompt_of_another_tenant_a_tenant_has_a_quarter_of_the_step() -> None:
    driver = Driver(num_blocks=256, max_batch_tokens=32, depth=1)
    under_way = driver.submit([1] * 100, max_tokens=1, tenant=Tenant("a", 1))
    driver.step()
    driver.submit([2] * 6, max_tokens=1, tenant=Tenant("b", 2))
    driver.submit([3] * 7, max_tokens=1, tenant=Tenant("c", 3))
    driver.submit([4] * 5, max_tokens=1, tenant=Tenant("b", 2))
    driver.drain()
    sizes = [plan.num_tokens for plan in driver.plans if plan.num_tokens]
    # In the second step both prompts of b, that of c, and one token of a, which has its quarter with c.
    assert sizes == [32, 11 + 8, 32, 32, 3]
    assert output(under_way) == expect([1] * 100, 1)


def test_alone_a_tenant_has_the_whole_step() -> None:
    driver = Driver(num_blocks=256, max_batch_tokens=32, depth=1)
    for first in range(3):
        driver.submit([first] * 60, max_tokens=1, tenant=Tenant("a", 1))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans if plan.num_tokens][:5] == [32] * 5
