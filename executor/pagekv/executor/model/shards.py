"""The ranks of a split model: the collectives that join the parts which each rank computed."""

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

# On CPUs, parts of at most this many bytes are all-gathered and summed here: gloo's ring all-reduce has twice as many
# messages, and waits for all of them. Over two ranks a step of 16 rows through 8 layers waited 14 ms instead of 21. For
# longer parts, an all-gather of more than two ranks would send too much. Two ranks always exchange their parts
# directly, which passes through fewer threads of gloo than an all-gather.
GATHERED_BYTES = 2**18
# Seconds that other ranks get to fail in the same work as this one: some compile for longer than others.
OTHERS_COMPILE_S = 60.0


class Shards:
    """The collectives of one rank; all ranks must call them in the same order. CPU tensors go through gloo, and the
    host waits. GPU tensors go through NCCL in the order of the device's stream, and the host does not wait. Errors of
    collectives are passed to `lost`, which need not return.
    """

    def __init__(self, world: World, lost: Callable[[str], None]) -> None:
        self.rank, self.size, self.local_size = world.rank, world.size, world.local_size
        self.lost = lost
        # Seconds for which a rank may keep others waiting; None while ranks load, when the group's timeout applies.
        self.limit_s: float | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        # Seconds that the host spent in collectives, including the wait for slower ranks.
        self.waited_s = 0.0
        self._recording = False

    def limit_waits(self, timeout_s: float) -> None:
        """From now on a collective on CPUs that takes more than `timeout_s` seconds fails: some rank does not join
        it.
        """
        # For CPUs only: a second group of GPUs would take device memory, and `RankMarks` limits waits for GPUs.
        self._cpu_group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend="gloo")
        self.limit_s = timeout_s

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context, a failed collective on GPUs is an ordinary error and does not end the group: if one rank
        cannot record a graph, no rank uses graphs.
        """
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place (all-reduce). All ranks get the same bits: each element is summed on one rank
        alone, or on every rank in the order of ranks.
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
        """Gathers the parts `[..., ceil(width / size)]` of all ranks into `[..., width]` on rank 0; zeros on the other
        ranks. The last part may be narrower.
        """
        padded = self._padded(rows, width)
        parts = None if self.rank else [torch.empty_like(padded) for _ in range(self.size)]
        self._join(padded, lambda: dist.gather(padded, parts, group=self._group(padded)))
        return rows.new_zeros(*rows.shape[:-1], width) if parts is None else torch.cat(parts, -1)[..., :width]

    def gather_everywhere(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """`gather`, with the result on all ranks (all-gather)."""
        padded = self._padded(rows, width)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._join(padded, lambda: dist.all_gather(parts, padded, group=self._group(padded)))
        return torch.cat(parts, -1)[..., :width]

    def share(self, rows: torch.Tensor) -> torch.Tensor:
        """Broadcasts rank 0's `rows` to all ranks, in place. The rows are contiguous, with the same shape and type on
        all ranks.
        """
        self._join(rows, lambda: dist.broadcast(rows, 0, group=self._group(rows)))
        return rows

    def tell(self, numbers: list[int], count: int) -> list[int]:
        """Broadcasts rank 0's `numbers`; every rank passes their `count`."""
        told = torch.tensor(numbers if self.rank == 0 else [0] * count, dtype=torch.int64)
        found: list[int] = self.share(told).tolist()
        return found

    def least(self, number: int, *, patient: bool = False, failure: Exception | None = None) -> int:
        """The least of the numbers of all ranks. `patient`: waits for as long as ranks may take to load. `failure`: the
        error by which this rank left its work, while other ranks may still wait for it in an earlier collective. If
        they join soon, because they failed too or did not need this rank, all continue; otherwise this rank is lost.
        """
        said = torch.tensor([number])
        group = None if patient else self._group(said)
        seconds = None if failure is None else OTHERS_S
        self._join(said, lambda: self._least_within(seconds, said, group), failure)
        return int(said)

    def all_say(self, yes: bool, *, patient: bool = False) -> bool:
        return bool(self.least(int(yes), patient=patient))

    def why_not_all(self, reason: str, remedy: str, *, failed: bool) -> str:
        """The reason why some rank cannot compute in a certain way: `reason` of this rank, or that another rank cannot;
        empty if all ranks can. `failed`: the way raised an error on this rank, and other ranks may wait for it in an
        earlier collective. Raises ValueError with the remedy if they do not join in time (they do if they fail too).
        This ends the start of all ranks, because another start would fail in the same way.
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
        """The process group for these rows; None is the default group, whose timeout is the time to load."""
        return None if rows.is_cuda else self._cpu_group

    def _least_within(self, seconds: float | None, said: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        """Replaces `said` by the least of all ranks. Raises RuntimeError if a rank does not join within `seconds`, or
        within the group's timeout if that is None.
        """
        found = said.new_empty(self.size)
        # By an all-to-all, which no rows go through: while another rank is still in an earlier collective, gloo would
        # take that rank's rows for these numbers and end the process.
        work = dist.all_to_all_single(found, said.repeat(self.size), group=group, async_op=True)
        assert work is not None  # this rank is in the group
        work.wait() if seconds is None else work.wait(timedelta(seconds=seconds))
        said[0] = found.min()

    def _padded(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        return nn.functional.pad(rows, (0, math.ceil(width / self.size) - rows.shape[-1])).contiguous()

    def _exchange(self, own: torch.Tensor, other: torch.Tensor) -> None:
        """Exchanges parts between two ranks."""
        sent = dist.isend(own, 1 - self.rank, group=self._group(own))
        dist.recv(other, 1 - self.rank, group=self._group(other))
        assert sent is not None  # this rank is in the group
        sent.wait()

    def _join(self, rows: torch.Tensor, collective: Callable[[], object], failure: Exception | None = None) -> None:
        begin = time.perf_counter()
        try:
            collective()
        except RuntimeError as error:
            if self._recording and rows.is_cuda:
                raise
            # Another rank is lost, or slower than the group's timeout: no rank can continue.
            why = "a collective failed" if failure is None else "this rank failed while others waited for it"
            self.lost(f"{why}: {str(failure or error).partition(chr(10))[0]}")
            raise
        self.waited_s += time.perf_counter() - begin
