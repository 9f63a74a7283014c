"""The page's last events: what became of requests and of the prefix table, in the order it happened."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pagekv.kvmanager.engine.interface import EngineInfo
from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepPlan

# What a new viewer is told of.
KEPT = 60

Happening = dict[str, Any]


class EventFeed(Observer):
    """Records while `recording` is set. An event has a number, counting from 1, a wall-clock time in seconds, a kind,
    and what that kind has to say.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.recording = False
        self.total = 0
        self._clock = clock
        self._kept: deque[Happening] = deque(maxlen=KEPT)

    def since(self, number: int) -> list[Happening]:
        """Those that are kept with numbers above this one."""
        return [happening for happening in self._kept if happening["n"] > number]

    def note(self, kind: str, **about: Any) -> None:
        """One more."""
        if self.recording:
            self.total += 1
            self._kept.append({"n": self.total, "at": round(self._clock(), 3), "kind": kind, **about})

    # -- what the engine tells

    def attached(self, model: EngineInfo, epoch: int) -> None:
        self.note("attached", epoch=epoch)

    def detached(self) -> None:
        self.note("detached")

    def rejected(self) -> None:
        self.note("rejected")

    def planned(self, plan: StepPlan) -> None:
        if not self.recording:
            return
        for sequence, kept in plan.preempted:
            self.note("preempted", request=sequence.request.command.request_id, swapped=kept)
        for new in plan.new:
            self.note(
                "resumed" if new.sequence.preemptions else "admitted",
                request=new.sequence.request.command.request_id,
                tokens=len(new.token_ids),
                computed=new.computed_tokens,
                blocks=len(new.block_ids),
            )

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        if self.recording:
            tokens = sum(sequence.num_output for sequence in request.sequences)
            self.note(end.value, request=request.command.request_id, tokens=tokens)
