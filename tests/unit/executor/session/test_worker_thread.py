"""A thread with a queue: order, results, errors, and jobs that must not raise."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pagekv.executor.session.worker_thread import WorkerThread


def test_jobs_run_in_order_and_calls_return_or_raise() -> None:
    seen: list[int] = []

    def fail() -> None:
        seen.clear()
        raise ValueError("logged, and the next job runs")

    async def test() -> None:
        worker = WorkerThread()
        for number in range(20):
            worker.post(lambda number=number: seen.append(number))  # type: ignore[misc]  # a lambda with a default
        assert await worker.call(lambda: len(seen)) == 20
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 // 0)
        worker.post(fail)
        assert await worker.call(threading.get_ident) != threading.get_ident()
        worker.stop()

    asyncio.run(test())
    assert seen == []


def test_a_call_that_is_cancelled_before_it_begins_does_not_run() -> None:
    gate, ran = threading.Event(), []

    def block() -> None:
        assert gate.wait(60)

    async def test() -> None:
        worker = WorkerThread()
        worker.post(block)
        call = asyncio.create_task(worker.call(lambda: ran.append(1)))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        gate.set()
        await worker.call(lambda: None)
        worker.stop()

    asyncio.run(test())
    assert ran == []
