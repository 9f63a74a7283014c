"""What the engine loop tells those who watch it: metrics, traces, recordings, the live page. They change nothing.

Every call is made on the event loop between two steps and has to be short: the next step waits for it. An observer that
needs more copies what it needs and works elsewhere.
"""

from __future__ import annotations

from enum import Enum

from pagekv.kvmanager.engine import ModelInfo
from pagekv.kvmanager.sequence import LiveRequest
from pagekv.kvmanager.step_plan import Committed, StepOutcome, StepPlan


class RequestEnd(Enum):
    """How a request left the engine."""

    FINISHED = "finished"  # every sequence ended by itself or by a stop string
    ABORTED = "aborted"  # by its client, a deadline or the end of the manager
    FAILED = "failed"  # with an error


class Observer:
    """Does nothing; observers override what they need. None of these may raise or keep what it is given unchanged:
    sequences and requests go on changing.
    """

    def attached(self, model: ModelInfo, epoch: int) -> None:
        """A new epoch began, with empty pools; `epoch` counts this manager's, from 1."""

    def detached(self) -> None:
        """The executor is lost; whatever ran waits."""

    def submitted(self, request: LiveRequest) -> None:
        """A request passed all checks and is queued."""

    def rejected(self) -> None:
        """A request was refused because the queue is full."""

    def planned(self, plan: StepPlan) -> None:
        """A step is about to be sent."""

    def committed(self, plan: StepPlan, outcome: StepOutcome, committed: Committed) -> None:
        """A step's results were taken in and handed to their readers."""

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        """A request has left; its sequences hold nothing."""
