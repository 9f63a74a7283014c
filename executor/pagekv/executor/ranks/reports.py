"""Compares the reports of the other ranks on each step with rank 0's results. Safe for several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

from pagekv.executor.session.epoch import RanksDiffer
from pagekv.executor.session.state_digest import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class RankReport:
    """A rank's report on one step. `worked_us`: microseconds of the step without the wait for other ranks."""

    epoch: int
    step: int
    digest: bytes
    worked_us: int

    _FORM = Struct(f"<QQ{DIGEST_BYTES}sQ")

    def to_bytes(self) -> bytes:
        return self._FORM.pack(self.epoch, self.step, self.digest, self.worked_us)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankReport:
        """Decodes `to_bytes`. Raises struct.error."""
        return cls(*cls._FORM.unpack(data))


class RanksLate(TimeoutError):
    """The ranks `ranks` did not finish a step in time."""

    def __init__(self, ranks: list[int], step: int, timeout_s: float) -> None:
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(f"{which} did not end step {step} within {timeout_s:g} s (--rank-timeout-s)")
        self.ranks = ranks


class RankReports:
    """The reports of one epoch, the latest that `begin` named; reports of other epochs are dropped."""

    def __init__(self, ranks: Iterable[int], timeout_s: float) -> None:
        """`timeout_s`: how long `settle` waits for reports."""
        self._changed, self._timeout_s, self._ranks = threading.Condition(), timeout_s, tuple(ranks)
        # The number of epochs in which a rank differed.
        self.num_differences = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        with self._changed:
            self._epoch = epoch
            # Rank 0's digest and time of each collected step that not every rank has reported yet, by step.
            self._own: dict[int, tuple[bytes, int]] = {}
            # For each rank: reports on steps that rank 0 has not collected yet, and the latest step compared.
            self._early: dict[int, list[RankReport]] = {rank: [] for rank in self._ranks}
            self._compared: dict[int, int] = dict.fromkeys(self._ranks, 0)
            self._worked: dict[int, dict[int, int]] = {}
            self._latest: tuple[int, ...] = ()
            # The first step that differed and its error; and whether `num_differences` counts it already.
            self._difference: tuple[int, RanksDiffer] | None = None
            self._counted = False
            self._changed.notify_all()

    def add(self, rank: int, report: RankReport) -> None:
        """Takes the report of a rank that has finished a step."""
        with self._changed:
            if report.epoch == self._epoch:
                self._early[rank].append(report)
                self._compare(rank)
                self._changed.notify_all()

    def fail(self, rank: int, epoch: int, step: int, reason: str) -> None:
        """Notes that a rank has failed or refused a step."""
        with self._changed:
            if epoch == self._epoch:
                self._differ(rank, step, reason)
                self._changed.notify_all()

    def settle(self, epoch: int, step: int, digest: bytes, worked_us: int) -> tuple[int, ...]:
        """Adds rank 0's result of a step, waits until every rank has reported the step before, and compares the reports
        that are there. Returns the microseconds by rank of the latest step that all have finished; empty if a later
        epoch has begun, because then the results are not used. Raises RanksDiffer or RanksLate.
        """

        def settled() -> bool:
            return self._epoch != epoch or self._differs(step) or min(self._compared.values()) >= step - 1

        with self._changed:
            # A later epoch may begin before the last steps of this one are collected.
            if self._epoch != epoch:
                return ()
            self._own[step] = (digest, worked_us)
            for rank in self._ranks:
                self._compare(rank)
            if not self._changed.wait_for(settled, self._timeout_s):
                late = [rank for rank, compared in self._compared.items() if compared < step - 1]
                raise RanksLate(late, step - 1, self._timeout_s)
            if self._epoch != epoch:
                return ()
            self._check(step)
            return self._latest

    def check(self, step: int) -> None:
        """Raises RanksDiffer if a rank has differed up to `step`, which rank 0 has launched."""
        with self._changed:
            self._check(step)

    def _differ(self, rank: int, step: int, how: str) -> None:
        if self._difference is None:
            self._difference = step, RanksDiffer(f"rank {rank} differs from rank 0 at step {step}: {how}")

    def _differs(self, step: int) -> bool:
        # Only up to `step`: another rank may have refused a later step before rank 0, which will refuse it too.
        return self._difference is not None and self._difference[0] <= step

    def _check(self, step: int) -> None:
        if self._difference is not None and self._differs(step):
            self.num_differences += not self._counted
            self._counted = True
            raise self._difference[1]

    def _compare(self, rank: int) -> None:
        early = self._early[rank]
        while early and early[0].step in self._own:
            report = early.pop(0)
            digest, worked_us = self._own[report.step]
            if digest != report.digest:
                words = f"tables or tokens are not the same (digests {report.digest.hex()} and {digest.hex()})"
                self._differ(rank, report.step, words)
            self._compared[rank] = report.step
            worked = self._worked.setdefault(report.step, {0: worked_us})
            worked[rank] = report.worked_us
            if len(worked) == 1 + len(self._ranks):
                self._latest = tuple(worked[each] for each in sorted(worked))
                del self._own[report.step], self._worked[report.step]
