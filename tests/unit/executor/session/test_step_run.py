"""A step ends once, in order; behind one that failed nothing is launched or told, on any rank."""

from __future__ import annotations

from support.executor.executor_steps import World, new_sequence

from pagekv.common.errors import InvalidRequest
from pagekv.executor.session.collector import Collector
from pagekv.executor.session.epoch import LaunchedStep
from pagekv.executor.session.step import ExecutedStep
from pagekv.executor.session.step_run import StepFailure, run_step


def test_a_step_behind_a_refused_one_is_not_launched() -> None:
    world, collector = World(), Collector()
    ended: list[ExecutedStep | StepFailure] = []

    def run(finished: list[int]) -> None:
        step = world.step(finished_seqs=finished)
        run_step(collector, world.epoch, step.step, lambda: world.epoch.launch(step), ended.append)

    world.enter(1, [5, 6, 7], [0])
    run([])
    run([9])
    assert isinstance(ended[0], ExecutedStep)
    failure = ended[1]
    assert isinstance(failure, StepFailure)
    assert isinstance(failure.refusal, InvalidRequest)
    assert (failure.step, failure.lost, world.epoch.over) == (3, False, True)
    assert failure.reason == str(failure.refusal)
    run([])
    assert len(ended) == 2


def test_an_error_of_the_backend_ends_the_epoch_once() -> None:
    world, collector = World(), Collector()
    ended: list[ExecutedStep | StepFailure] = []

    def launch() -> LaunchedStep:
        raise ArithmeticError("not a number")

    step = world.step(new_seqs=[new_sequence(1, [5, 6, 7], [0])])
    launched = world.epoch.launch(step)
    run_step(collector, world.epoch, 2, launch, ended.append)
    run_step(collector, world.epoch, 1, lambda: launched, ended.append)
    assert ended == [StepFailure(2, None, "ArithmeticError: not a number", lost=False)]
