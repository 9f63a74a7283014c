"""The times of a step's report: how long the step took, and how long the executor had waited for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.executor.executor_steps import World, new_sequence

from pagekv.executor.backend.interface import Finished, Launch, Scheduled
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.session import epoch as epoch_module
from pagekv.executor.session.step import Step

STEP_US = 5000


class Clock:
    """Microseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_us = 1_000_000

    def perf_counter_ns(self) -> int:
        return self.now_us * 1000


class TimedBackend(OracleBackend):
    """Computes for `STEP_US`; where it is `late`, after `launch` has returned."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(OracleModel())
        self.clock, self.late = clock, False

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        sampled = self.execute(scheduled)
        if not self.late:
            self.clock.now_us += STEP_US
        return Finished(sampled)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(epoch_module, "time", SimpleNamespace(perf_counter_ns=clock.perf_counter_ns))
    return clock


def world(clock: Clock) -> tuple[World, TimedBackend]:
    backend = TimedBackend(clock)
    world = World()
    backend.allocate(world.epoch.limits.block_size, world.epoch.limits.num_device_blocks, 0)
    world.epoch.backend = backend
    return world, backend


def test_threads_are_told_where_the_backend_tells_them(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, backend = world(clock)
    assert executor.run(new_seqs=[new_sequence(1, [1, 2, 3], [1])]).threads == 0
    launch = backend.launch
    monkeypatch.setattr(backend, "launch", lambda scheduled: Finished(launch(scheduled).collect(), 3))
    assert executor.run().threads == 3


def test_waiting_is_from_the_end_of_one_step_to_the_beginning_of_the_next(clock: Clock) -> None:
    executor, _ = world(clock)
    first = executor.run(new_seqs=[new_sequence(1, [1, 2, 3], [1])])
    assert (first.execute_us, first.idle_us) == (STEP_US, 0)
    clock.now_us += 700
    second = executor.run()
    assert (second.execute_us, second.idle_us) == (STEP_US, 700)
    third = executor.run()
    assert (third.execute_us, third.idle_us) == (STEP_US, 0)


def test_a_step_launched_while_another_ran_waited_for_nothing_and_began_when_that_one_ended(clock: Clock) -> None:
    executor, backend = world(clock)
    epoch = executor.epoch
    executor.run(new_seqs=[new_sequence(1, [1, 2, 3], [1])])
    backend.late = True
    clock.now_us += 300
    running = epoch.launch(Step(epoch.epoch, 2))
    clock.now_us += 1000
    ahead = epoch.launch(Step(epoch.epoch, 3, scheduled_seqs=[1], scheduled_tokens=[0]))
    clock.now_us += 4000
    report = running.collect()
    assert (report.execute_us, report.idle_us) == (5000, 300)
    clock.now_us += 2500
    report = ahead.collect()
    assert (report.execute_us, report.idle_us) == (2500, 0)
