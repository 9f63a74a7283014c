"""Collects launched steps in their order, on a thread of its own where one has to be waited for."""

from __future__ import annotations

from collections.abc import Callable

from pagekv.executor.session.worker_thread import WorkerThread


class Collector:
    """Runs jobs, in the order in which one thread gives them: on that thread where a job is ready and none is left
    before it, else on the collect thread, which the first such job starts.
    """

    def __init__(self) -> None:
        self._thread: WorkerThread | None = None
        # Jobs of the collect thread: given to it, counted on the thread that gives them alone, and done, counted on the
        # collect thread alone. Equal: it has nothing to do, and only the thread that gives can change that.
        self._num_given = self._num_done = 0

    def run(self, job: Callable[[], None], ready: bool) -> None:
        """`ready`: the job does not wait. Must not raise."""
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
        """Waits for the jobs that were given before."""
        if self._thread is not None:
            await self._thread.call(lambda: None)
