"""Backends that return from `launch` before the step is computed: the next step is launched meanwhile, and what is
reported stays in order and whole (DESIGN 4: steps run strictly in order, refused whole)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from support.event_loop import run_by
from support.executor.executor_steps import attach_order, new_sequence

from pagekv.common.errors import InvalidRequest, Unavailable
from pagekv.executor.backend.interface import UNKNOWN_TOKEN, Launch, Sampled, Scheduled, SequenceState
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.session.session import Session, StepFailed
from pagekv.executor.session.step import ExecutedStep, Step
from pagekv.executor.session.step_stream import StepStream
from pagekv.executor.session.worker_thread import WorkerThread


@dataclass
class Waiting:
    """A launch that computes nothing and ends when its gate opens; token 100 + step."""

    backend: LateBackend
    number: int
    seq_ids: list[int]
    ready: bool = False

    def collect(self) -> dict[int, Sampled]:
        assert self.backend.gates[self.number].wait(120)
        self.backend.journal.append(f"collect {self.number}")
        if self.number == self.backend.fails_at:
            raise ArithmeticError("not a number")
        if self.number == self.backend.dies_at:
            self.backend.dead = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nand much advice")
        return {seq_id: Sampled(100 + self.number) for seq_id in self.seq_ids}


class LateBackend(OracleBackend):
    """Notes what it is asked to do; step n (from 1) ends when `gates[n]` is set."""

    def __init__(self) -> None:
        super().__init__(OracleModel())
        self.gates = [threading.Event() for _ in range(9)]
        self.launched = [threading.Event() for _ in range(9)]
        self.journal: list[str] = []
        self.last_tokens: list[int] = []
        self.fails_at = 0
        self.dead = False
        self.dies_at = 0
        self.cannot_say = False
        self.left: list[int] = []

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.journal.append("allocate")
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def is_lost(self, error: Exception) -> bool:
        if self.cannot_say:
            raise OSError("the driver is gone")
        return self.dead

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        number = len(self.last_tokens) + 1
        self.journal.append(f"launch {number}")
        self.last_tokens.append(scheduled[0].state.token_ids[-1])
        self.launched[number].set()
        return Waiting(self, number, [item.state.seq_id for item in scheduled if item.samples])

    def finish(self, states: list[SequenceState]) -> None:
        self.left += [state.seq_id for state in states]


class Pipelined:
    """A session over a LateBackend, one epoch and one stream."""

    def __init__(self, session: Session, backend: LateBackend, epoch: int) -> None:
        self.session, self.backend, self.epoch = session, backend, epoch
        self.stream: StepStream = session.open_stream()
        self.reports = self.stream.reports()

    async def enter(self) -> None:
        """Step 1: sequence 5 enters with a prompt of three tokens."""
        entering = new_sequence(5, [1, 2, 3], [0])
        await self.submit(Step(self.epoch, 1, new_seqs=[entering], scheduled_seqs=[5], scheduled_tokens=[3]))

    async def submit(self, step: Step) -> None:
        await self.session.submit(self.stream, step)

    async def launched(self, number: int) -> None:
        assert await asyncio.to_thread(self.backend.launched[number].wait, 20)

    async def report(self) -> ExecutedStep:
        return await anext(self.reports)


def pipelined(test: Callable[[Pipelined], Awaitable[None]]) -> None:
    async def main() -> None:
        compute = WorkerThread()
        session, backend = Session(compute), LateBackend()
        session.serve(backend)
        async with asyncio.timeout(120):
            epoch = await session.attach(attach_order())
            backend.journal.clear()
            await test(Pipelined(session, backend, epoch))
        compute.stop()

    asyncio.run(main())


@run_by(pipelined)
async def test_the_next_step_is_launched_while_one_runs(it: Pipelined) -> None:
    await it.enter()
    await it.submit(Step(it.epoch, 2))
    await it.submit(Step(it.epoch, 3, finished_seqs=[5]))
    await it.launched(2)
    assert it.backend.journal == ["launch 1", "launch 2"]
    # The second step was planned without the first one's token.
    assert it.backend.last_tokens == [3, UNKNOWN_TOKEN]
    for gate in it.backend.gates:
        gate.set()
    reports = [await it.report() for _ in range(3)]
    assert [report.step for report in reports] == [1, 2, 3]
    assert [report.sampled for report in reports] == [{5: Sampled(101)}, {5: Sampled(102)}, {}]
    assert it.backend.left == [5]
    assert it.backend.journal[2:] == ["collect 1", "collect 2"]


@run_by(pipelined)
async def test_tokens_are_filled_in_when_collected(it: Pipelined) -> None:
    await it.enter()
    it.backend.gates[1].set()
    await it.report()
    await it.submit(Step(it.epoch, 2))
    await it.launched(2)
    assert it.backend.last_tokens == [3, 101]
    it.backend.gates[2].set()
    await it.report()


@run_by(pipelined)
async def test_a_refusal_waits_for_the_steps_before_it(it: Pipelined) -> None:
    await it.enter()
    await it.submit(Step(it.epoch, 2, finished_seqs=[6]))
    await it.launched(1)
    it.backend.gates[1].set()
    assert (await it.report()).sampled == {5: Sampled(101)}
    with pytest.raises(InvalidRequest, match=r"finished_seqs\[0\]"):
        await it.report()
    assert it.backend.journal == ["launch 1", "collect 1"]


@run_by(pipelined)
async def test_no_step_behind_one_that_failed_is_reported(it: Pipelined) -> None:
    it.backend.fails_at = 1
    await it.enter()
    await it.submit(Step(it.epoch, 2))
    await it.launched(2)
    for gate in it.backend.gates:
        gate.set()
    with pytest.raises(StepFailed, match="step 1: ArithmeticError: not a number"):
        await it.report()
    await it.session.shut_down()
    assert it.backend.journal == ["launch 1", "launch 2", "collect 1"]


@run_by(pipelined)
async def test_a_lost_device_is_told_after_the_step_and_nothing_is_answered_any_more(it: Pipelined) -> None:
    it.backend.dies_at = 2
    await it.enter()
    await it.submit(Step(it.epoch, 2))
    await it.submit(Step(it.epoch, 3))
    await it.launched(3)
    for gate in it.backend.gates:
        gate.set()
    assert (await it.report()).sampled == {5: Sampled(101)}
    with pytest.raises(StepFailed, match="step 2: RuntimeError: CUDA error: an illegal memory access"):
        await it.report()
    await it.session.lost.wait()
    reason = it.session.lost_reason
    assert reason.endswith("step 2: RuntimeError: CUDA error: an illegal memory access was encountered")
    for call in (it.session.describe(16, 64), it.session.attach(attach_order())):
        with pytest.raises(Unavailable, match="the executor's device failed, and the executor restarts"):
            await call
    await it.session.shut_down()


@run_by(pipelined)
async def test_a_device_that_is_found_lost_while_attaching(it: Pipelined) -> None:
    """A failure after the last step of an epoch shows when the next one begins."""
    it.backend.dead = True
    with pytest.raises(Unavailable, match="the executor restarts"):
        await it.session.attach(attach_order())
    await it.session.lost.wait()
    assert "illegal memory access" in it.session.lost_reason


@run_by(pipelined)
async def test_a_device_that_cannot_say_whether_it_is_lost_is_taken_for_lost(it: Pipelined) -> None:
    """Else nothing would be answered until the manager's step timeout."""
    it.backend.fails_at, it.backend.cannot_say = 1, True
    await it.enter()
    for gate in it.backend.gates:
        gate.set()
    with pytest.raises(StepFailed, match="step 1: ArithmeticError: not a number"):
        await it.report()
    await it.session.lost.wait()
    assert it.session.lost_reason.endswith("step 1: ArithmeticError: not a number")


@run_by(pipelined)
async def test_a_failed_step_alone_loses_no_device(it: Pipelined) -> None:
    it.backend.fails_at = 1
    await it.enter()
    for gate in it.backend.gates:
        gate.set()
    with pytest.raises(StepFailed):
        await it.report()
    await it.session.attach(attach_order())
    assert not it.session.lost.is_set()


@run_by(pipelined)
async def test_shutting_down_delivers_what_was_launched(it: Pipelined) -> None:
    await it.enter()
    await it.launched(1)
    ending = asyncio.create_task(it.session.shut_down())
    await asyncio.sleep(0)
    it.backend.gates[1].set()
    await ending
    assert (await it.report()).sampled == {5: Sampled(101)}


@run_by(pipelined)
async def test_the_end_of_input_comes_after_the_last_report(it: Pipelined) -> None:
    await it.enter()
    it.session.finish_input(it.stream)
    await it.launched(1)
    it.backend.gates[1].set()
    assert (await it.report()).step == 1
    with pytest.raises(StopAsyncIteration):
        await it.report()
