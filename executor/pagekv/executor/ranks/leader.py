"""Rank 0's side of the group: the links to the other ranks, and a backend whose calls run on all ranks."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pagekv.common.errors import InvalidRequest, PageKVError
from pagekv.executor.backend.interface import (
    Backend,
    BackendDescription,
    BlockCopies,
    GraphCounts,
    Launch,
    Scheduled,
    SequenceState,
)
from pagekv.executor.ranks.agreement import RanksDisagree, description_from_json, group_description
from pagekv.executor.ranks.calls import Call, CallBroken, failure
from pagekv.executor.ranks.link import Kind, LinkLost, RankLink
from pagekv.executor.ranks.reports import RankReport, RankReports, RanksLate
from pagekv.executor.ranks.watch import RankWatch
from pagekv.executor.session.epoch import RanksDiffer
from pagekv.executor.session.step import Step
from pagekv.executor.session.step_check import EpochLimits

T = TypeVar("T")


class Leader:
    """The other ranks, as rank 0 sees them. Implements `OtherRanks`."""

    def __init__(self, watch: RankWatch, serves: Callable[[], None] | None = None) -> None:
        """`watch`: the watch over the links to the other ranks, not started yet. `serves` is called when all ranks have
        pools for the first time, which ends the start; None: the ranks of this torchrun have served before.
        """
        self.watch, self._links, self._serves = watch, watch.links, serves
        self._reports = RankReports(self._links, watch.timeout_s)
        # The latest call on all ranks.
        self._call = Call("", self._links, self._break)
        self._epoch = 0
        for rank, link in self._links.items():
            threading.Thread(target=self._read, args=(rank, link), name=f"rank {rank}", daemon=True).start()
        watch.start()

    @property
    def size(self) -> int:
        """The number of ranks, including rank 0."""
        return 1 + len(self._links)

    @property
    def num_differences(self) -> int:
        """The number of epochs that ended because a rank's result differed."""
        return self._reports.num_differences

    def call(self, kind: Kind, content: Any, own: Callable[[], T]) -> tuple[T, dict[int, Any]]:
        """Makes a call on all ranks at the same time, on this one by `own`. Returns the result of `own` and the answers
        of the others. An error of `own` is raised when all ranks have answered. Raises CallBroken if they do not: the
        group is then lost.
        """
        call = self._call = Call(kind.name.lower(), self._links, self._break)
        self._tell(kind, content)
        try:
            found = own()
        except Exception as error:
            call.answer(0, failure(error))
            call.wait()
            raise
        call.answer(0, {})
        return found, call.wait()

    def started(self) -> None:
        """Notes that all ranks have pools. If a call fails from now on, another start of the ranks may help."""
        if self._serves is not None:
            self._serves()
            self._serves = None

    def failed(self, reason: str) -> None:
        """Notes that a rank has failed in a call. During the start this ends the group for good, unless the error may
        be gone after another start.
        """
        if self._serves is not None and not self._call.can_pass:
            self.watch.give_up(reason)

    def _break(self, reason: str) -> None:
        self.failed(reason)
        self.watch.lose(reason)

    def hand_on(self, epoch: int, limits: EpochLimits, step: Step) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._reports.begin(epoch)
            content = {**asdict(limits), "features": sorted(limits.features)}
            self._tell(Kind.EPOCH, {"epoch": epoch, "limits": content})
        self._reports.check(step.step - 1)
        self._send(Kind.STEP, step.encoded)

    def collected(self, epoch: int, step: int, digest: bytes, worked_us: int) -> tuple[int, ...]:
        try:
            return self._reports.settle(epoch, step, digest, worked_us)
        except RanksLate as error:
            self.watch.lose(str(error), *error.ranks)
            raise

    def stop(self) -> None:
        self.watch.stop()
        for link in self._links.values():
            with suppress(LinkLost):
                link.send(Kind.BYE)

    def _tell(self, kind: Kind, content: Any) -> None:
        self._send(kind, json.dumps(content).encode())

    def _send(self, kind: Kind, data: bytes) -> None:
        for rank, link in self._links.items():
            try:
                link.send(kind, data)
            except LinkLost as error:
                self.watch.lose(f"rank {rank} was lost: {error}", rank)

    def _read(self, rank: int, link: RankLink) -> None:
        try:
            while True:
                message = link.receive()
                self.watch.heard(rank)
                if message.kind is Kind.REPORT:
                    self._reports.add(rank, RankReport.from_bytes(message.data))
                elif message.kind is Kind.FAILED:
                    failed = message.content
                    self._reports.fail(rank, failed["epoch"], failed["step"], failed["reason"])
                elif message.kind is Kind.ANSWER:
                    self._call.answer(rank, message.content)
                elif message.kind is Kind.ENDS:
                    self.watch.lose(f"rank {rank} ends: {message.content}")
                elif message.kind is Kind.CANNOT_START:
                    self.watch.give_up(message.content)
        except (LinkLost, struct.error, KeyError, TypeError) as error:
            self.watch.lose(f"rank {rank} was lost: {error}", rank)


class PoolsDoNotFit(MemoryError):
    """A rank has too little memory for its pools. All ranks have answered, so none waits for another."""


class GroupBackend:
    """The backend that rank 0 serves: `describe` and `allocate` run on all ranks. Implements `Backend`. The epoch
    passes the steps themselves on (`OtherRanks`).
    """

    def __init__(self, own: Backend, leader: Leader) -> None:
        self._own, self.leader = own, leader

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        """The description of the group. Raises InvalidRequest if a rank does, and RanksDisagree."""
        content = {"block_size": block_size, "token_budget": token_budget}
        description, answers = self._call(Kind.DESCRIBE, content, lambda: self._own.describe(block_size, token_budget))
        others = {rank: description_from_json(answer["description"]) for rank, answer in answers.items()}
        try:
            found = group_description({0: description, **others})
        except RanksDisagree as error:
            self.leader.failed(str(error))
            raise
        return replace(found, tensor_parallel_size=self.leader.size, rank_differences=self.leader.num_differences)

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> GraphCounts | None:
        """Allocates the pools of all ranks. Raises PoolsDoNotFit if a rank raises MemoryError."""
        order = [block_size, num_device_blocks, num_host_blocks]
        short: dict[int, str] = {}

        def allocate() -> GraphCounts | None:
            try:
                return self._own.allocate(*order)
            except MemoryError as error:
                short[0] = str(error)
                return None

        counts, answers = self._call(Kind.ALLOCATE, order, allocate)
        short |= {rank: answer["short"] for rank, answer in answers.items() if "short" in answer}
        if short:
            raise PoolsDoNotFit("; ".join(f"rank {rank}: {error}" for rank, error in short.items()))
        self.leader.started()
        return counts

    def _call(self, kind: Kind, content: Any, own: Callable[[], T]) -> tuple[T, dict[int, Any]]:
        """`Leader.call`, but raises an error if any rank has failed."""
        words = f"failed to {kind.name.lower()}"
        try:
            found, answers = self.leader.call(kind, content, own)
        except (PageKVError, CallBroken):
            raise
        except Exception as error:
            self.leader.failed(f"rank 0 {words}: {failure(error)['error']}")
            raise
        for rank, answer in answers.items():
            if "field" in answer:
                raise InvalidRequest(answer["field"], f"{answer['error']} (rank {rank})")
            if "error" in answer:
                reason = f"rank {rank} {words}: {answer['error']}"
                self.leader.failed(reason)
                raise RuntimeError(reason)
        return found, answers

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._own.copy_blocks(copies)

    def launch(self, scheduled: list[Scheduled]) -> Launch:
        return self._own.launch(scheduled)

    def finish(self, states: list[SequenceState]) -> None:
        self._own.finish(states)

    def prepare(self) -> bool:
        """`prepare` of rank 0's own backend, if it has one. The other ranks call theirs in `Follower.run`."""
        prepare = getattr(self._own, "prepare", None)
        return prepare is not None and prepare()

    def is_lost(self, error: Exception) -> bool:
        """`is_lost` of rank 0's own backend, but False for errors that are found between steps, when no rank waits for
        another: a difference between ranks, and errors after all ranks have answered `describe` or `allocate`.
        """
        return not isinstance(error, (RanksDiffer, PoolsDoNotFit, PageKVError)) and self._own.is_lost(error)
