"""Reports of each rank on each step, compared with those of rank 0. Used by several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from struct import Struct

from pagekv.executor.session.epoch import RanksDiffer
from pagekv.executor.session.state_digest import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class RankReport:
    """A step on one rank. `worked_us`: without the time in which it waited for other ranks."""

    epoch: int
    step: int
    digest: bytes
    worked_us: int

    _FORM = Struct(f"<QQ{DIGEST_BYTES}sQ")

    def to_bytes(self) -> bytes:
        return self._FORM.pack(self.epoch, self.step, self.digest, self.worked_us)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankReport:
        """Raises struct.error."""
        return cls(*cls._FORM.unpack(data))


class RanksLate(TimeoutError):
    """`ranks` did not end a step in time."""

    def __init__(self, ranks: list[int], step: int, timeout_s: float) -> None:
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(f"{which} did not end step {step} within {timeout_s:g} s (--rank-timeout-s)")
        self.ranks = ranks


class RankReports:
    """Of the epoch that `begin` named last; reports of others are dropped."""

    def __init__(self, ranks: Iterable[int], timeout_s: float) -> None:
        """`timeout_s`: how long `settle` waits for a report."""
        self._changed, self._timeout_s, self._ranks = threading.Condition(), timeout_s, tuple(ranks)
        # Epochs in which a rank differed.
        self.num_differences = 0
        self.begin(0)

    def begin(self, epoch: int) -> None:
        with self._changed:
            self._epoch = epoch
            # Steps that rank 0 has collected and not every rank reported, by number: its digest and its time.
            self._own: dict[int, tuple[bytes, int]] = {}
            # The reports of each rank that rank 0 has not come to yet, and the latest step that was compared.
            self._early: dict[int, list[RankReport]] = {rank: [] for rank in self._ranks}
            self._compared: dict[int, int] = dict.fromkeys(self._ranks, 0)
            self._worked: dict[int, dict[int, int]] = {}
            self._latest: tuple[int, ...] = ()
            # The first step that a rank did otherwise, and how; and whether that is counted.
            self._difference: tuple[int, RanksDiffer] | None = None
            self._counted = False
            self._changed.notify_all()

    def add(self, rank: int, report: RankReport) -> None:
        """A rank has ended a step."""
        with self._changed:
            if report.epoch == self._epoch:
                self._early[rank].append(report)
                self._compare(rank)
                self._changed.notify_all()

    def fail(self, rank: int, epoch: int, step: int, reason: str) -> None:
        """A rank has not ended a step."""
        with self._changed:
            if epoch == self._epoch:
                self._differ(rank, step, reason)
                self._changed.notify_all()

    def settle(self, epoch: int, step: int, digest: bytes, worked_us: int) -> tuple[int, ...]:
        """Adds a step of rank 0's, waits until every rank has reported the one before, and compares what is there.
        Returns microseconds by rank of the latest step that all ended; none of an epoch behind which another one has
        begun, whose results nobody waits for. Raises RanksDiffer or RanksLate.
        """

        def settled() -> bool:
            return self._epoch != epoch or self._differs(step) or min(self._compared.values()) >= step - 1

        with self._changed:
            # A backend may let an epoch begin before the last steps of the one before are collected.
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
        """Raises RanksDiffer where a rank did something else up to a step that rank 0 has done."""
        with self._changed:
            self._check(step)

    def _differ(self, rank: int, step: int, how: str) -> None:
        if self._difference is None:
            self._difference = step, RanksDiffer(f"rank {rank} differs from rank 0 at step {step}: {how}")

    def _differs(self, step: int) -> bool:
        # A step that rank 0 refuses may have been refused by another rank before.
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
