"""A thread with a queue of jobs, which calls the backend or collects steps. Jobs run strictly in the order in which
they were posted. While there are none, the thread may do work that is not urgent, in short pieces.
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

# Seconds without a job after which the thread counts as idle; the time between two steps is shorter.
IDLE_S = 0.05

T = TypeVar("T")


def release_frames(error: BaseException | None) -> None:
    """Clears the local variables in the tracebacks of an error and of the errors that led to it. Otherwise an error
    that a job or a reference cycle keeps alive could keep a pool of gigabytes, and the next pool would not fit.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class WorkerThread:
    """A thread with a queue. States: running from construction, stopped after `stop`.

    It is a daemon thread, so that a backend that hangs cannot keep the process from exiting.
    """

    def __init__(self, name: str = "compute") -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Does one piece of idle work; True if more can be done before the next job.
        self._when_idle: Callable[[], bool] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Queues a job, which reports its own result and must not raise. Callers bound the queue."""
        self._jobs.put(job)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` after everything queued; returns its result or raises its error.

        Cancelling the caller does not stop a function that is already running.
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
        """Calls `piece` whenever no job came for IDLE_S, and again until it returns False or a job comes. So a job
        waits for one piece at most. Takes effect after the next job.
        """
        self._when_idle = piece

    def stop(self) -> None:
        """Ends the thread after the queued jobs; does not wait for that."""
        self._jobs.put(None)

    def _work(self) -> None:
        job = self._jobs.get()
        while job is not None:
            _run(job)
            job = next_job(self._jobs, self._when_idle)


def next_job(jobs: SimpleQueue[T], piece: Callable[[], bool] | None) -> T:
    """Waits for the next job. Meanwhile does pieces of idle work, if `piece` is given, as `WorkerThread.when_idle`
    describes.
    """
    if piece is not None:
        with suppress(Empty):
            return jobs.get(timeout=IDLE_S)
        while _run(piece):
            with suppress(Empty):
                return jobs.get_nowait()
    return jobs.get()


def _run(function: Callable[[], object]) -> object:
    """The function's result; logs an exception and returns None."""
    try:
        return function()
    except Exception:
        log.exception("a job raised", thread=threading.current_thread().name)
        return None
