"""The latest events of requests and of the prefix table, in order, for the page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.engine.views import BlockMap, EngineInfo
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepPlan

# Most events that are kept. A new viewer gets all of them.
KEPT = 60

Event = dict[str, Any]


class EventFeed(Observer):
    """Records while `recording` is set. Events have a number `n` from 1 on, seconds `at`, a kind and its fields."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.recording = False
        self.total = 0
        # Whether each block was in the prefix table at the latest look.
        self._published: NDArray[np.bool_] | None = None
        self._epoch = self._evictions = 0
        self._clock = clock
        self._kept: deque[Event] = deque(maxlen=KEPT)

    def since(self, number: int) -> list[Event]:
        """Kept events with a number above this one."""
        return [event for event in self._kept if event["n"] > number]

    def note(self, kind: str, **about: Any) -> None:
        if self.recording:
            self.total += 1
            self._kept.append({"n": self.total, "at": round(self._clock(), 3), "kind": kind, **about})

    def pause(self) -> None:
        """Stops recording; the next look counts as the first."""
        self.recording = False
        self._published = None

    def look(self, blocks: BlockMap) -> None:
        """Records how many blocks entered and left the prefix table since the look before: events "cleared", "evicted",
        and "stored" with the first stored block. The first look, and the first one of an epoch, records nothing. A
        block that was evicted and filled again in between counts as evicted and as stored.
        """
        before, evicted, same_pool = self._published, blocks.evictions - self._evictions, blocks.epoch == self._epoch
        now = self._published = blocks.published.copy()
        self._epoch, self._evictions = blocks.epoch, blocks.evictions
        if before is None or not same_pool:
            return
        entered = np.flatnonzero(now & ~before)
        left, had = int(np.count_nonzero(before & ~now)), int(np.count_nonzero(before))
        stored = int(np.count_nonzero(now)) - had + evicted
        if left == had > evicted:
            self.note("cleared", blocks=had)
            stored = len(entered)
        elif evicted:
            self.note("evicted", blocks=evicted)
        if stored > 0:
            self.note("stored", blocks=stored, block=int(entered[0]) if len(entered) else None)

    # -- Observer

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
