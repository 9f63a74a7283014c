"""The ranks of a split model, as one of them sees them: how parts that they computed are joined."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from pagekv.common.phases import phase
from pagekv.executor.world import OTHERS_S, World

# Parts of so many bytes at most are gathered and summed here, on CPUs: gloo's ring has twice the messages, and waits
# for all of them. Over two ranks a step of 16 rows through 8 layers waited 14 ms instead of 21. Of longer parts more
# than two ranks would send too much. Two ranks send each other their parts, whatever the size: that passes through
# fewer threads of gloo than a gathering of two.
GATHERED_BYTES = 2**18
# Seconds that other ranks get to fail in what this one failed in: some compile longer than others.
OTHERS_COMPILE_S = 60.0


class Shards:
    """Every method that joins is called by all ranks alike. Tensors of CPUs are joined by gloo, for which the host
    waits; those of GPUs by NCCL, in the order of the device's stream, for which it does not. Errors of collectives are
    given to `lost`, which need not return.
    """

    def __init__(self, world: World, lost: Callable[[str], None]) -> None:
        self.rank, self.size, self.local_size = world.rank, world.size, world.local_size
        self.lost = lost
        # Seconds that a rank may let others wait; None while they load, for which they have the group's time.
        self.limit_s: float | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        # Seconds that the host was in collectives, which others' slowness is part of.
        self.waited_s = 0.0
        self._recording = False

    def limit_waits(self, timeout_s: float) -> None:
        """From now on a collective of CPUs that takes so many seconds fails: a rank is there, but does not come to
        it.
        """
        # A second group of GPUs would take memory of them; `RankMarks` limits how long they are waited for.
        self._cpu_group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
        self.limit_s = timeout_s

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, a collective of GPUs that fails is an error and no loss: where a graph cannot have it, no rank has
        graphs.
        """
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; the same bits on each: every element is summed on one rank, or by all of
        them in the order of ranks.
        """
        rows = rows if rows.is_contiguous() else rows.contiguous()
        if rows.is_cuda or (self.size > 2 and rows.nbytes > GATHERED_BYTES):
            self._join(rows, lambda: dist.all_reduce(rows, group=self._group(rows)))
            return rows
        parts = rows.new_empty(self.size, *rows.shape)
        if self.size == 2:
            parts[self.rank] = rows
            self._join(rows, lambda: self._exchange(rows, parts[1 - self.rank]))
        else:
            self._join(rows, lambda: dist.all_gather_into_tensor(parts, rows[None], group=self._group(rows)))
        torch.add(parts[0], parts[1], out=rows)
        for part in parts[2:]:
            rows += part
        return rows

    def gather(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """`[..., width]` on rank 0, of the parts `[..., ceil(width / size)]` of all ranks, the last of which may be
        narrower; zeros on the others.
        """
        padded = self._padded(rows, width)
        parts = None if self.rank else [torch.empty_like(padded) for _ in range(self.size)]
        self._join(padded, lambda: dist.gather(padded, parts, group=self._group(padded)))
        return rows.new_zeros(*rows.shape[:-1], width) if parts is None else torch.cat(parts, -1)[..., :width]

    def gather_everywhere(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """The same on all ranks."""
        padded = self._padded(rows, width)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._join(padded, lambda: dist.all_gather(parts, padded, group=self._group(padded)))
        return torch.cat(parts, -1)[..., :width]

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Rank 0's `rows`, in place, which are contiguous and of one shape and type on all ranks."""
        self._join(rows, lambda: dist.broadcast(rows, 0, group=self._group(rows)))
        return rows

    def tell(self, numbers: list[int], count: int) -> list[int]:
        """Rank 0's `numbers`, of which every rank knows the count."""
        told = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        found: list[int] = self.share(told).tolist()
        return found

    def least(self, number: int, *, patient: bool = False, failure: Exception | None = None) -> int:
        """The least of the numbers that ranks have. `patient`: others get the time that they had to load. `failure`: of
        this rank, for which others may wait in a collective before. If they come soon, having failed likewise or done
        without it, all go on; else this rank is lost.
        """
        said = torch.tensor([number])
        group = None if patient else self._group(said)
        seconds = None if failure is None else OTHERS_S
        self._join(said, lambda: self._least_within(seconds, said, group), failure)
        return int(said)

    def all_say(self, yes: bool, *, patient: bool = False) -> bool:
        return bool(self.least(int(yes), patient=patient))

    def why_not_all(self, reason: str, remedy: str, *, failed: bool) -> str:
        """Why not all ranks can compute in one way: `reason`, of this rank, or that another one cannot; empty where all
        can. `failed`: it did on this rank, for which others may wait in a collective before. If they do not come in
        time, having failed likewise, ValueError is raised with the remedy, which ends the start of all: anew they would
        find the same.
        """
        if not failed:
            return "" if self.all_say(not reason) else reason or "another rank cannot"
        said = torch.tensor([0])
        try:
            with phase(f"{reason}; waiting for the other ranks"):
                self._least_within(OTHERS_COMPILE_S, said, self._group(said))
        except RuntimeError:
            raise ValueError(f"{reason}, on this rank alone: {remedy}") from None
        return reason

    def _group(self, rows: torch.Tensor) -> dist.ProcessGroup | None:
        """None: that of all ranks, with the time that they get to load."""
        return None if rows.is_cuda else self._cpu_group

    def _least_within(self, seconds: float | None, said: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """The least, in place, of all ranks. Raises RuntimeError where some do not come to it in so many seconds; None:
        in the group's time.
        """
        found = said.new_empty(self.size)
        # By an operation that joins no rows: gloo ends a process to which another rank sends rows in their place.
        work = dist.all_to_all_single(found, said.repeat(self.size), group=group, async_op=True)
        assert work is not None  # of a rank that is in the group
        work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
        said[0] = found.min()

    def _padded(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        return nn.functional.pad(rows, (0, math.ceil(width / self.size) - rows.shape[-1])).contiguous()

    def _exchange(self, own: torch.Tensor, other: torch.Tensor) -> None:
        """Sends the part of this rank to the other one of two, and takes that one's."""
        sent = dist.isend(own, 1 - self.rank, group=self._group(own))
        dist.recv(other, 1 - self.rank, group=self._group(other))
        assert sent is not None  # of a rank that is in the group
        sent.wait()

    def _join(self, rows: torch.Tensor, collective: Callable[[], object], failure: Exception | None = None) -> None:
        begin = time.perf_counter()
        try:
            collective()
        except RuntimeError as error:
            if self._recording and rows.is_cuda:
                raise
            # Others may be lost, or slow beyond the group's time; none can go on from here.
            why = "a collective failed" if failure is None else "this rank failed, and left others waiting"
            self.lost(f"{why}: {str(failure or error).partition(chr(10))[0]}")
            raise
        self.waited_s += time.perf_counter() - begin
