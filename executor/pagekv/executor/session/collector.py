"""Collects launched steps in order, on a separate thread if a step has to be waited for."""

from __future__ import annotations

from collections.abc import Callable

from pagekv.executor.session.worker_thread import WorkerThread


class Collector:
    """Runs jobs in the order in which one thread submits them. A job that is ready runs on the submitting thread if no
    earlier job is left. Any other job runs on the collect thread, which the first such job starts.
    """

    def __init__(self) -> None:
        self._thread: WorkerThread | None = None
        # Jobs submitted to the collect thread, counted by the submitting thread only, and jobs done, counted by the
        # collect thread only. If they are equal, the collect thread is idle until the submitting thread changes that.
        self._num_given = self._num_done = 0

    def run(self, job: Callable[[], None], ready: bool) -> None:
        """Runs a job, which must not raise. `ready`: the job does not wait for anything."""
        if ready and self._num_given == self._num_done:
            job()
            return

        def counted() -> None:
            job()
            self._num_done += 1

        self._num_given += 1
        self._thread = self._thread or WorkerThread("collect")
        self._thread.post(counted)

    async def wait(self) -> None:
        """Waits for all jobs submitted so far."""
        if self._thread is not None:
            await self._thread.call(lambda: None)
