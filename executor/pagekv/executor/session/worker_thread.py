"""A thread with a queue, for calling the backend or for collecting steps. Jobs run strictly in the order they were
posted. While there are none, the thread may do something that is not urgent, in short pieces.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from pagekv.common.logs import Log

log = Log(__name__)

# Without a job for so long the thread is idle; between two steps it is not.
IDLE_S = 0.05

T = TypeVar("T")


def release_frames(error: BaseException | None) -> None:
    """Takes from an error, and from those behind it, the variables of the functions that they left. An error that is
    kept, by a job or by a cycle of references, would keep with these a pool of gigabytes, and the next pool would find
    no room.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class WorkerThread:
    """States: running from construction, stopped after `stop`.

    A daemon: a backend that hangs cannot keep the process from exiting.
    """

    def __init__(self, name: str = "compute") -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Does a piece, and tells whether more can be done before the next job.
        self._when_idle: Callable[[], bool] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Queues a job that reports its own result and must not raise. Callers bound the queue."""
        self._jobs.put(job)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` after everything queued and returns or raises what it does.

        Cancelling the caller does not stop a function that runs already.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:
                release_frames(error)
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        return await asyncio.wrap_future(future)

    def when_idle(self, piece: Callable[[], bool]) -> None:
        """Calls `piece` whenever no job came for IDLE_S, and again until it returns False or there is a job: a job
        waits for one piece at most. From the next job on.
        """
        self._when_idle = piece

    def stop(self) -> None:
        """Ends the thread after what is queued; does not wait for it."""
        self._jobs.put(None)

    def _work(self) -> None:
        job = self._jobs.get()
        while job is not None:
            _run(job)
            job = next_job(self._jobs, self._when_idle)


def next_job(jobs: SimpleQueue[T], piece: Callable[[], bool] | None) -> T:
    """The next job of a thread, which does pieces of idle work, if it has any, as `WorkerThread.when_idle` says."""
    if piece is not None:
        with suppress(Empty):
            return jobs.get(timeout=IDLE_S)
        while _run(piece):
            with suppress(Empty):
                return jobs.get_nowait()
    return jobs.get()


def _run(function: Callable[[], object]) -> object:
    """Its result; None where it raises."""
    try:
        return function()
    except Exception:
        log.exception("a job raised", thread=threading.current_thread().name)
        return None
