"""One Run call: a bound on steps in flight, results in order, and the error that ends it."""

from __future__ import annotations

import asyncio

import pytest
from support.event_loop import in_event_loop

from pagekv.common.errors import StaleEpoch
from pagekv.executor.session.step import ExecutedStep
from pagekv.executor.session.step_stream import MAX_IN_FLIGHT, StepStream


def executed(step: int) -> ExecutedStep:
    return ExecutedStep(1, step, {}, 0, 0, 0)


@in_event_loop
async def test_room_comes_with_results() -> None:
    stream = StepStream()
    for _ in range(MAX_IN_FLIGHT):
        await stream.wait_for_room()
    waiting = asyncio.create_task(stream.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    for step in (1, 2):
        stream.deliver(executed(step))
    # A manager that reads no results sends no more steps either, though they have been computed.
    reports = stream.reports()
    await anext(reports)
    await asyncio.sleep(0)
    assert not waiting.done()
    await anext(reports)
    await waiting


@in_event_loop
async def test_results_come_in_order_up_to_the_end_or_the_error() -> None:
    stream = StepStream()
    for step in (1, 2):
        stream.deliver(executed(step))
    stream.deliver(None)
    assert [report.step async for report in stream.reports()] == [1, 2]
    stream.deliver(executed(3))
    stream.deliver(StaleEpoch("over"))
    reports = stream.reports()
    assert (await anext(reports)).step == 3
    with pytest.raises(StaleEpoch):
        await anext(reports)
