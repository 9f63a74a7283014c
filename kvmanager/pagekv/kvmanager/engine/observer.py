"""Observers of the engine loop (metrics, traces, recordings, the live page), which change nothing.

Every call is made on the event loop between two steps and has to be short, because the next step waits for it. Longer
work belongs elsewhere, on a copy of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from pagekv.common.logs import Log
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.kvcache.prefix_table import Blocks
from pagekv.kvmanager.scheduling.listener import SchedulerListener
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import Committed, StepPlan, StepResult

log = Log(__name__)


class RequestEnd(Enum):
    """The way in which a request ended."""

    FINISHED = "finished"  # every sequence ended by itself or by a stop string
    ABORTED = "aborted"  # by its client, a deadline or the end of the manager
    FAILED = "failed"  # with an error


class Observer(SchedulerListener):
    """Does nothing; observers override the methods they need. An observer that raises is dropped."""

    def attached(self, model: EngineInfo, epoch: int) -> None:
        """A new epoch began, with empty pools; `epoch` counts this manager's epochs, from 1."""

    def detached(self) -> None:
        """The executor is lost; running requests wait."""

    def submitted(self, request: LiveRequest) -> None:
        """A request passed all checks and is queued."""

    def rejected(self) -> None:
        """A request was refused: too many sequences wait to be computed, or to be read."""

    def planned(self, plan: StepPlan) -> None:
        """A step is about to be sent."""

    def committed(self, plan: StepPlan, result: StepResult, committed: Committed) -> None:
        """A step's results were committed and pushed to their streams."""

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        """A request ended; its sequences hold no blocks."""

    def pinned(self, blocks: Blocks) -> None:
        """A pin is about to hold these blocks."""

    def unpinned(self, blocks: Blocks) -> None:
        """The pin of these blocks is about to end."""


class Observers(Observer):
    """Passes every call on to all observers. One that raises is logged and dropped, so it cannot end serving."""

    def __init__(self) -> None:
        # Replaced, never changed, because an observer may be dropped while a call iterates over them.
        self._all: tuple[Observer, ...] = ()

    def add(self, observer: Observer) -> None:
        self._all = (*self._all, observer)


def _passed_on(what: str) -> Callable[..., None]:
    def passed_on(self: Observers, *told: object) -> None:
        for observer in self._all:
            try:
                getattr(observer, what)(*told)
            except Exception:
                log.exception(
                    "an observer failed and gets no more events; serving continues",
                    observer=type(observer).__name__,
                    told=what,
                )
                self._all = tuple(other for other in self._all if other is not observer)

    return passed_on


# Overrides every method of an observer.
for _name in dir(Observer):
    if not _name.startswith("_"):
        setattr(Observers, _name, _passed_on(_name))
