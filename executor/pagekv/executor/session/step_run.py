"""Runs one step from launch to its end, on any rank. The first step that fails ends its epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagekv.common.errors import PageKVError
from pagekv.common.logs import Log
from pagekv.executor.session.collector import Collector
from pagekv.executor.session.epoch import Epoch, LaunchedStep, is_lost
from pagekv.executor.session.step import ExecutedStep
from pagekv.executor.session.worker_thread import release_frames

log = Log(__name__)


@dataclass(frozen=True, slots=True)
class StepFailure:
    """The failure of a step, which ends its epoch."""

    step: int
    # The error, if the step was refused before it began.
    refusal: PageKVError | None
    reason: str
    # Whether the device is lost to this process.
    lost: bool


def run_step(
    collector: Collector,
    epoch: Epoch,
    step: int,
    launch: Callable[[], LaunchedStep],
    ended: Callable[[ExecutedStep | StepFailure], None],
) -> None:
    """Launches a step, unless its epoch is over, and has it collected after the earlier steps. Runs on the thread that
    calls the backend. `ended` is called on the thread that collects the step, but not for steps after a failed one.
    """
    if epoch.over:
        return
    try:
        launched = launch()
    except Exception as error:
        # Set at once, before a later step is launched.
        epoch.over = True
        failure = _failure(epoch, step, error)
        collector.run(lambda: _fail(epoch, failure, ended), True)
        return
    collector.run(lambda: _collect(epoch, step, launched, ended), launched.ready)


def _collect(
    epoch: Epoch, step: int, launched: LaunchedStep, ended: Callable[[ExecutedStep | StepFailure], None]
) -> None:
    if epoch.failed:
        return
    try:
        executed = launched.collect()
    except Exception as error:
        _fail(epoch, _failure(epoch, step, error), ended)
    else:
        ended(executed)


def _failure(epoch: Epoch, step: int, error: Exception) -> StepFailure:
    """Describes and logs the failure. Runs on the thread on which the step failed."""
    if isinstance(error, PageKVError):
        log.warning("refused a step", epoch=epoch.epoch, step=step, reason=error)
        return StepFailure(step, error, str(error), lost=False)
    lost = is_lost(epoch.backend, error)
    if not lost:
        log.exception("a step failed", epoch=epoch.epoch, step=step)
    release_frames(error)
    return StepFailure(step, None, f"{type(error).__name__}: {error}", lost)


def _fail(epoch: Epoch, failure: StepFailure, ended: Callable[[ExecutedStep | StepFailure], None]) -> None:
    if not epoch.failed:
        epoch.over = epoch.failed = True
        ended(failure)
