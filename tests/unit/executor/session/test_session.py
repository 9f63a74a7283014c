"""Epochs without gRPC: they rise whatever the clock does, and never two of them touch the pools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from support.event_loop import run_by
from support.executor.executor_steps import attach_order, new_sequence

from pagekv.common.errors import FailedPrecondition, InvalidRequest, StaleEpoch
from pagekv.executor.backend.interface import BackendDescription, Sampled, Sampling, Scheduled
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.session.attach_check import AttachOrder
from pagekv.executor.session.session import Session
from pagekv.executor.session.step import Step
from pagekv.executor.session.step_stream import StepStream
from pagekv.executor.session.worker_thread import WorkerThread


class Journal(OracleBackend):
    """Notes who allocates (by the number of blocks) and whose sequences run (by their ids)."""

    def __init__(self) -> None:
        super().__init__(OracleModel())
        self.entries: list[tuple[str, int]] = []

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.entries.append(("allocate", num_device_blocks))
        super().allocate(block_size, num_device_blocks, num_host_blocks)

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        self.entries.append(("step", scheduled[0].state.seq_id))
        return super().execute(scheduled)


def order(manager: int, take_over: bool = True) -> AttachOrder:
    """Manager `manager` attaches with as many blocks."""
    return attach_order(f"m{manager}", num_device_blocks=manager, take_over=take_over)


def in_session(
    test: Callable[[Session, Journal], Awaitable[None]],
    clock_ns: Callable[[], int] | None = None,
    make: Callable[[], Journal] = Journal,
) -> None:
    async def main() -> None:
        compute = WorkerThread()
        session = Session(compute) if clock_ns is None else Session(compute, clock_ns)
        backend = make()
        session.serve(backend)
        async with asyncio.timeout(120):
            await test(session, backend)
        compute.stop()

    asyncio.run(main())


def test_epochs_rise_even_if_the_clock_goes_back() -> None:
    times = iter([1000, 1000, 5, 2000])

    async def test(session: Session, backend: Journal) -> None:
        assert [await session.attach(order(1)) for _ in range(4)] == [1000, 1001, 1002, 2000]

    in_session(test, lambda: next(times))


@run_by(in_session)
async def test_attaches_at_once_get_different_epochs_and_the_last_one_holds(session: Session) -> None:
    epochs = await asyncio.gather(*(session.attach(order(manager)) for manager in range(1, 9)))
    assert len(set(epochs)) == 8
    stream = session.open_stream()
    await session.submit(stream, Step(epochs[-1], 1))
    with pytest.raises(FailedPrecondition, match="another manager drives") as held:
        await session.attach(order(3, take_over=False))
    assert (held.value.kind, held.value.subject) == ("EXECUTOR_HELD", "manager_id")
    with pytest.raises(FailedPrecondition, match="has a stream already") as twice:
        await session.submit(session.open_stream(), Step(epochs[-1], 1))
    assert (twice.value.kind, twice.value.subject) == ("STREAM_OPEN", str(epochs[-1]))
    with pytest.raises(StaleEpoch):
        await session.submit(session.open_stream(), Step(epochs[0], 1))
    session.close_stream(stream)
    await session.attach(order(3, take_over=False))


def test_a_backend_s_own_bound_of_log_probabilities_holds() -> None:
    class Few(Journal):
        def describe(self, block_size: int, token_budget: int) -> BackendDescription:
            return replace(super().describe(block_size, token_budget), max_logprobs=5)

    async def test(session: Session, backend: Journal) -> None:
        epoch = await session.attach(order(4))
        stream = session.open_stream()
        entering = replace(new_sequence(1, [1], [0]), sampling=Sampling(logprobs=6))
        await session.submit(stream, Step(epoch, 1, new_seqs=[entering]))
        with pytest.raises(InvalidRequest, match="must be from 0 to 5, got 6"):
            await anext(stream.reports())

    in_session(test, make=Few)


async def feed(session: Session, stream: StepStream, epoch: int, seq_id: int, rng: random.Random) -> None:
    """Eight steps of one sequence, then the end of input."""
    for step in range(1, 9):
        await session.submit(stream, Step(epoch, step, new_seqs=[new_sequence(seq_id, [1], [0])] if step == 1 else []))
        await asyncio.sleep(rng.choice([0, 0, 0.0005]))
    session.finish_input(stream)


@run_by(in_session)
async def test_managers_that_take_over_from_each_other_never_share_the_pools(
    session: Session, backend: Journal
) -> None:
    rng = random.Random(5)
    fenced = 0

    async def drive(session: Session, manager: int) -> None:
        nonlocal fenced
        for _ in range(25):
            epoch = await session.attach(order(manager))
            stream = session.open_stream(epoch)
            feeding = asyncio.create_task(feed(session, stream, epoch, manager, rng))
            try:
                steps = [report.step async for report in stream.reports()]
                assert steps == list(range(1, 9))
            except StaleEpoch:
                fenced += 1
            finally:
                feeding.cancel()
                await asyncio.wait([feeding])
                session.close_stream(stream)

    await asyncio.gather(*(drive(session, manager) for manager in (1, 2, 3)))
    owner = 0
    for what, manager in backend.entries:
        if what == "allocate":
            owner = manager
        assert manager == owner
    assert fenced > 0
    assert not session._streams
