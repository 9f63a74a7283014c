"""A rank other than rank 0: it executes the messages that come over the link, in order, and reports the results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from queue import SimpleQueue
from typing import Any

from pagekv.common.errors import PageKVError
from pagekv.common.logs import Log
from pagekv.executor.backend.interface import Backend, BackendFeature
from pagekv.executor.ranks.calls import failure
from pagekv.executor.ranks.link import Kind, LinkLost, Message
from pagekv.executor.ranks.reports import RankReport
from pagekv.executor.ranks.watch import RankWatch
from pagekv.executor.rpc import wire
from pagekv.executor.session.collector import Collector
from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.state_digest import StateDigest
from pagekv.executor.session.step import ExecutedStep
from pagekv.executor.session.step_check import EpochLimits
from pagekv.executor.session.step_run import StepFailure, run_step
from pagekv.executor.session.worker_thread import next_job
from pagekv.executor.world import OTHERS_S

log = Log(__name__)
LEADER = 0


class Follower:
    """A rank that follows rank 0. States: connected from the beginning, over when `run` returns."""

    def __init__(self, watch: RankWatch) -> None:
        """`watch`: the watch over the link to rank 0, not started yet."""
        self.watch, self._link = watch, watch.links[LEADER]
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._epoch: Epoch | None = None
        self._collector = Collector()
        self._reader = threading.Thread(target=self._read, name="rank 0", daemon=True)
        self._reader.start()
        self.watch.start()

    def _send(self, kind: Kind, content: Any) -> None:
        try:
            self._link.send_json(kind, content)
        except LinkLost as error:
            self.watch.lose(f"rank 0 was lost: {error}", LEADER)

    def run(self, backend: Backend) -> None:
        """Executes rank 0's messages with the backend until the group ends in order. Call it on the thread that made
        the backend. While no message comes, the backend's `prepare` is called.
        """
        prepare = getattr(backend, "prepare", None)
        while (message := next_job(self._messages, prepare)) is not None:
            if message.kind is Kind.STEP:
                if self._epoch is not None:
                    self._run_step(self._epoch, message.data)
            elif message.kind is Kind.EPOCH:
                self._epoch = _epoch(message.content, backend)
            elif message.kind is Kind.DESCRIBE:
                self._send(Kind.ANSWER, _answer(_described, backend, message.content))
            elif message.kind is Kind.ALLOCATE:
                # The steps launched before are finished first, as in a session, because messages are in order.
                self._epoch = None
                self._send(Kind.ANSWER, _answer(_allocated, backend, message.content))

    def end(self, reason: str, kind: Kind) -> None:
        """Tells rank 0 that this rank ends, and gives rank 0 some time to end first, with this reason."""
        self.watch.end(reason, kind=kind)
        self._reader.join(OTHERS_S)

    def _read(self) -> None:
        try:
            while (message := self._link.receive()).kind is not Kind.BYE:
                self.watch.heard(LEADER)
                if message.kind is Kind.ENDS:
                    self.watch.lose(f"rank 0 ends: {message.content}")
                elif message.kind is Kind.CANNOT_START:
                    self.watch.give_up(message.content)
                elif message.kind is not Kind.BEAT:
                    self._messages.put(message)
            self.watch.stop()
            self._messages.put(None)
        except LinkLost as error:
            self.watch.lose(f"rank 0 was lost: {error}", LEADER)
            self._messages.put(None)

    def _run_step(self, epoch: Epoch, data: bytes) -> None:
        ended = partial(self._ended, epoch)
        run_step(self._collector, epoch, epoch.next_step, lambda: epoch.launch(wire.step(data)), ended)

    def _ended(self, epoch: Epoch, outcome: ExecutedStep | StepFailure) -> None:
        """Reports a step or its failure to rank 0, which has the reports of all earlier steps by then."""
        if isinstance(outcome, ExecutedStep):
            with suppress(LinkLost):  # the reader has noticed
                report = RankReport(epoch.epoch, outcome.step, outcome.digest, outcome.rank_us[0])
                self._link.send(Kind.REPORT, report.to_bytes())
            return
        reason = f"it refused the step: {outcome.reason}" if outcome.refusal else outcome.reason
        self._send(Kind.FAILED, {"epoch": epoch.epoch, "step": outcome.step, "reason": reason})
        if outcome.lost:
            # The other ranks may wait for this one in a collective, so the group cannot continue.
            self.watch.lose(f"step {outcome.step} failed on this rank: {reason}")


def _epoch(content: dict[str, Any], backend: Backend) -> Epoch:
    values = {field.name: content["limits"][field.name] for field in fields(EpochLimits)}
    values["features"] = frozenset(map(BackendFeature, values["features"]))
    return Epoch(content["epoch"], "rank 0", EpochLimits(**values), backend, digest=StateDigest())


def _answer(call: Callable[[Backend, Any], dict[str, Any]], backend: Backend, content: Any) -> dict[str, Any]:
    try:
        return call(backend, content)
    except Exception as error:
        log.error("a call of rank 0 failed", reason=error, exc_info=not isinstance(error, (PageKVError, MemoryError)))
        return failure(error)


def _described(backend: Backend, content: dict[str, int]) -> dict[str, Any]:
    return {"description": asdict(backend.describe(**content))}


def _allocated(backend: Backend, content: list[int]) -> dict[str, Any]:
    try:
        backend.allocate(*content)
    except MemoryError as error:
        # An answer and not a failure: all ranks know of it, or need not.
        return {"short": str(error)}
    return {}
