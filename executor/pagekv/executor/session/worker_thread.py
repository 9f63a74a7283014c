"""A thread with a queue, for calling the backend or for collecting steps. Jobs run strictly in the order they were
posted, with nothing in between.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from pagekv.common.logs import Log

log = Log(__name__)
T = TypeVar("T")


class WorkerThread:
    """States: running from construction, stopped after `stop`.

    A daemon: a backend that hangs cannot keep the process from exiting.
    """

    def __init__(self, name: str = "compute") -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
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
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Ends the thread after what is queued; does not wait for it."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job raised", thread=self._thread.name)
