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


def test_idle_work_is_done_until_there_is_a_job_or_no_more_of_it() -> None:
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def piece() -> bool:
        done.append("piece")
        if len(done) == 3:
            begun.set()
            assert go_on.wait(60)
        return True

    def last_piece() -> bool:
        done.append("last piece")
        begun.set()
        return False

    async def test() -> None:
        worker = WorkerThread()
        worker.when_idle(piece)
        await worker.call(lambda: None)
        assert await asyncio.to_thread(begun.wait, 60)
        # Both jobs go before the next piece.
        worker.post(begun.clear)
        worker.post(lambda: worker.when_idle(last_piece))
        go_on.set()
        await worker.call(lambda: done.append("job"))
        assert await asyncio.to_thread(begun.wait, 60)
        await worker.call(lambda: None)
        worker.stop()

    asyncio.run(test())
    assert done[:5] == ["piece", "piece", "piece", "job", "last piece"]


def test_idle_work_that_raises_is_logged_and_done_again_after_the_next_job(caplog: pytest.LogCaptureFixture) -> None:
    raised = threading.Semaphore(0)

    def piece() -> bool:
        raised.release()
        raise ValueError("no")

    async def test() -> None:
        worker = WorkerThread()
        worker.when_idle(piece)
        for _ in range(2):
            await worker.call(lambda: None)
            assert await asyncio.to_thread(raised.acquire, timeout=60)
        worker.stop()

    asyncio.run(test())
    assert "a job raised" in caplog.text
