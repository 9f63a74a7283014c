"""Recovery from a lost step or executor: requests to give up, and pauses between attempts to attach.

The recovery itself is `EngineLoop.run`: it attaches anew, and in the new epoch everything is planned again.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from pagekv.common.errors import ComputationFailed
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import StepPlan


class Fault(Enum):
    """How an epoch ended. The value is the number of failed attempts that it counts against the step that was due."""

    # The executor was shut down in order, or another manager took it over.
    NONE = 0.0
    # The executor is gone without a status. Most often it was killed from outside, but a step can kill it each time.
    GONE = 0.25
    # The executor reported that the step failed or breaks a rule, answered another step, or did not answer in time.
    STEP = 1.0


class WrongAnswer(Exception):
    """The executor's answer cannot be true: its epoch is over. The message names field and value."""

    fault = Fault.STEP

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"StepResult.{field}: {description}")


class FailedSteps:
    """Counts consecutive failed attempts by request: a request that cannot be computed must not keep all others from
    running. A token, or a decision of a beam search, clears the count, because such a request comes to an end.
    """

    def __init__(self, most_attempts: int) -> None:
        self._most = most_attempts
        # Keyed by request and not by id: ids may be used again.
        self._attempts: dict[LiveRequest, float] = {}

    def count(self, plan: StepPlan, running: Iterable[Seq], fault: Fault) -> list[LiveRequest]:
        """Counts a failed attempt for the requests in the step, whose sequences are among `running`; a sequence that
        entered later must not be. Removes and returns the requests that have no attempts left.
        """
        took_part = {*plan.sampling.tolist(), *(new.seq_id for new in plan.new)}
        for seq_id, tokens in zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True):
            (took_part.add if tokens else took_part.discard)(seq_id)
        requests = {sequence.request for sequence in running if sequence.seq_id in took_part}
        # Requests that ended meanwhile, or were not in this step, start again from 0.
        self._attempts = {request: self._attempts.get(request, 0.0) + fault.value for request in requests}
        spent = [request for request, attempts in self._attempts.items() if attempts >= self._most]
        for request in spent:
            del self._attempts[request]
        return sorted(spent, key=lambda request: request.arrival)

    def error(self, request: LiveRequest) -> ComputationFailed:
        """The error of a request without attempts left. Only the logs have the reason: it may name other requests."""
        return ComputationFailed(
            f"request {request.command.request_id!r} could not be computed: its step failed {self._most} times with no "
            "token in between; the logs of manager and executor have the reason"
        )

    def clear(self, plan: StepPlan, sequences: Iterable[Seq]) -> None:
        """Notes that a step was answered: `sequences` got a token each, the beams of `plan` their decision."""
        if self._attempts:
            for sequence in (*sequences, *plan.beams.values()):
                self._attempts.pop(sequence.request, None)


# Most consecutive refusals of the same pools: a second or two, in which an earlier executor's memory may become free.
MOST_ROOM_REFUSALS = 8


class RoomRefusals:
    """Counts consecutive refusals of the same pools for lack of memory; other sizes start the count anew."""

    def __init__(self) -> None:
        self._asked: tuple[int, int] | None = None
        self._count = 0

    def are_final(self, asked: tuple[int, int] | None) -> bool:
        """Counts a refusal of the `asked` device and host blocks, None for a step's memory; returns whether to end."""
        self._count = self._count + 1 if asked == self._asked else 1
        self._asked = asked
        return self._count >= MOST_ROOM_REFUSALS


# Seconds between attempts to attach, doubled from the first to the last.
RECONNECT_FIRST_S, RECONNECT_LAST_S = 0.05, 2.0
# Longest pause if an attempt did not attach: asking an executor that does not answer, or that another manager drives,
# costs next to nothing, and clients wait.
UNREACHABLE_S = 0.25


class Reconnect:
    """Pauses between attempts to attach, growing until a step is answered: each epoch recomputes everything."""

    def __init__(self) -> None:
        self._pause_s = RECONNECT_FIRST_S

    def pause_s(self, *, attached: bool, steps: int) -> float:
        """The pause after an attempt that attached or not, and in which `steps` steps were answered."""
        if steps:
            self._pause_s = RECONNECT_FIRST_S
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 2, RECONNECT_LAST_S)
        return pause_s if attached else min(pause_s, UNREACHABLE_S)
