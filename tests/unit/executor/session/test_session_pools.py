"""Pools of gigabytes are gone when an epoch ends, however it ends: the next ones would find no room beside them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from support.executor.executor_steps import attach_order, new_sequence

from pagekv.common.errors import OutOfMemory
from pagekv.executor.backend.interface import BackendDescription, Launch, Scheduled
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.session.session import Session, StepFailed
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.worker_thread import WorkerThread


class Pool:
    """Memory that is there once at a time."""


class OnePool(OracleBackend):
    """Has a pool of its own beside the oracle's, which functions that fail look at."""

    def __init__(self, step_time_s: float = 0.0) -> None:
        super().__init__(OracleModel(), step_time_s=step_time_s)
        self.pool: Pool | None = None
        self.pools: list[weakref.ref[Pool]] = []
        self.fails = False

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.pool = None
        assert [pool() for pool in self.pools] == [None] * len(self.pools), "pools before are still there"
        pool = Pool()
        self.pools.append(weakref.ref(pool))
        if self.fails:
            raise MemoryError("no room for graphs")
        self.pool = pool
        super().allocate(block_size, num_device_blocks, num_host_blocks)

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        pool = self.pool
        assert pool is not None
        if self.fails:
            raise RuntimeError("out of memory")
        return super().launch(scheduled)


@pytest.fixture(autouse=True)
def _collects_no_garbage() -> Iterator[None]:
    """A server makes too few objects between two attachments for a collection to come."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _serve(backend: OnePool, test: Callable[[Session], Awaitable[None]]) -> None:
    async def main() -> None:
        compute = WorkerThread()
        session = Session(compute)
        session.serve(backend)
        async with asyncio.timeout(120):
            await test(session)
            await session.shut_down()
        compute.stop()

    asyncio.run(main())


async def _rest(reports: AsyncIterator[ExecutedStep]) -> list[ExecutedStep]:
    return [report async for report in reports]


def test_too_little_memory_for_a_profile_is_told_as_it_is() -> None:
    """And not as an error inside, with a traceback in the log at each look of a manager."""

    class Small(OnePool):
        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            raise MemoryError("a step of 64 tokens needs more memory than there is: lower --max-batch-tokens")

    async def test(session: Session) -> None:
        for _ in range(2):
            with pytest.raises(OutOfMemory, match=r"^a step of 64 tokens needs .*: lower --max-batch-tokens$"):
                await session.describe(16, 64)

    _serve(Small(), test)


@pytest.mark.parametrize("step_time_s", [0.0, 0.02])
def test_after_a_step_that_failed(step_time_s: float) -> None:
    """Where steps take time, the failed one waits behind one that runs, on another thread than it failed on."""
    backend = OnePool(step_time_s)

    async def test(session: Session) -> None:
        for _ in range(2):
            epoch = await session.attach(attach_order())
            stream = session.open_stream()
            reports = stream.reports()
            entering = new_sequence(5, [1, 2, 3], [0])
            await session.submit(stream, Step(epoch, 1, new_seqs=[entering], scheduled_seqs=[5], scheduled_tokens=[3]))
            await session.submit(stream, Step(epoch, 2))
            assert (await anext(reports)).step == 1
            backend.fails = True
            await session.submit(stream, Step(epoch, 3))
            with pytest.raises(StepFailed, match="RuntimeError: out of memory"):
                await _rest(reports)
            session.close_stream(stream)
            backend.fails = False
        await session.attach(attach_order())

    _serve(backend, test)


def test_after_an_attachment_that_failed() -> None:
    backend = OnePool()

    async def test(session: Session) -> None:
        backend.fails = True
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="no room for graphs"):
                await session.attach(attach_order())
        backend.fails = False
        await session.attach(attach_order())

    _serve(backend, test)
