"""Swapping whole blocks between device and host memory: one asynchronous memcpy per contiguous run of slabs, on copy
streams beside the one that computes.

    swapper = BlockSwapper(Streams(), device_pool, host_pool)    # host_pool page-locked
    swapper.swap_out([7, 8, 9], [0, 1, 2])                           # waits on the device for what was enqueued before
    swapper.swap_in([5], [7])                                        # ordered after the copy that reads block 7
    swapper.before_compute(blocks_of_the_step)                       # the computation waits for these blocks alone

Nothing here waits on the host. Copies out and in have a stream each, so both directions of the bus work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that are neighbours in both pools."""

    source: int
    destination: int
    count: int


def runs(sources: Sequence[int], destinations: Sequence[int]) -> list[Run]:
    """The fewest runs that copy sources[i] to destinations[i] for every i, in no particular order.

    Raises ValueError where the lists differ in length, or a block is a destination twice.
    """
    if len(sources) != len(destinations):
        raise ValueError(f"destinations: must have {len(sources)} entries, as sources, got {len(destinations)}")
    if not len(sources):
        return []
    pairs = np.array([sources, destinations], np.int64)
    # Pairs are independent of each other. With the same distance between both sides, neighbours in order of the source
    # are neighbours on both; the given order does not matter (blocks are freed last block first).
    distance = pairs[1] - pairs[0]
    pairs = pairs[:, np.lexsort((pairs[0], distance))]
    if len(np.unique(pairs[1])) < len(sources):
        raise ValueError("destinations: names a block twice")
    apart = np.any(np.diff(pairs, axis=1) != 1, axis=0)
    first = np.flatnonzero(np.concatenate([[True], apart]))
    counts = np.diff(np.append(first, len(sources)))
    return [Run(*run) for run in zip(*pairs[:, first].tolist(), counts.tolist(), strict=True)]


class CopyStream(Enum):
    """The streams of a device; work of one stream runs in its order."""

    COMPUTE = "compute"
    OUT = "out"
    IN = "in"


class Streams:
    """Two copy streams of the current GPU, beside torch's current stream. Tests replace this class."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._copies = {CopyStream.OUT: torch.cuda.Stream(), CopyStream.IN: torch.cuda.Stream()}

    def mark(self, stream: CopyStream) -> Any:
        """An event after everything that is enqueued on the stream so far."""
        event: Any = self._torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: CopyStream, event: Any) -> None:
        """Work that is enqueued on the stream from now on runs after the event."""
        self._stream(stream).wait_event(event)

    def done(self, event: Any) -> bool:
        """Whether everything before the event has run."""
        return bool(event.query())

    def copy(self, stream: CopyStream, destination: Any, source: Any) -> None:
        """Enqueues the copy of contiguous memory of one type, which is one `cudaMemcpyAsync`."""
        with self._torch.cuda.stream(self._stream(stream)):
            destination.copy_(source, non_blocking=True)

    def _stream(self, stream: CopyStream) -> Any:
        return self._copies[stream] if stream in self._copies else self._torch.cuda.current_stream()


@dataclass(slots=True)
class _Transfer:
    """Copies of one call that may be under way."""

    stream: CopyStream
    event: Any
    device_blocks: npt.NDArray[np.int64]
    host_blocks: npt.NDArray[np.int64]


class BlockSwapper:
    """Swaps blocks of one pair of pools. Used by one thread.

    Calls take effect in their order. A swap runs after everything that was enqueued on the compute stream before, and
    `before_compute` makes later work of the compute stream wait.
    """

    def __init__(self, streams: Streams, device_pool: Any, host_pool: Any) -> None:
        """Both pools are tensors or arrays `[num_blocks, ...]`, contiguous, with blocks of equal size."""
        if tuple(device_pool.shape[1:]) != tuple(host_pool.shape[1:]) or device_pool.dtype != host_pool.dtype:
            raise ValueError(
                f"host_pool: must have blocks as device_pool, {tuple(device_pool.shape[1:])} of {device_pool.dtype}, "
                f"got {tuple(host_pool.shape[1:])} of {host_pool.dtype}"
            )
        self._streams = streams
        self._device = device_pool
        self._host = host_pool
        self._pending: list[_Transfer] = []

    def swap_out(self, sources: Sequence[int], destinations: Sequence[int]) -> int:
        """Copies device blocks to host blocks, pairs by position; returns the number of copies enqueued.

        Raises ValueError, with nothing enqueued, for ids outside of a pool, or a destination named twice.
        """
        return self._swap(CopyStream.OUT, sources, destinations)

    def swap_in(self, sources: Sequence[int], destinations: Sequence[int]) -> int:
        """`swap_out` in the other direction: host blocks to device blocks."""
        return self._swap(CopyStream.IN, sources, destinations)

    def before_compute(self, device_blocks: npt.ArrayLike | None = None) -> None:
        """Makes later work of the compute stream wait for every swap that touches one of these blocks; None: for all
        swaps. The id -1 stands for no block.

        A step that neither reads nor writes a block may run beside the copy that saves it.
        """
        self._remove_done()
        waiting = self._pending
        if device_blocks is not None and waiting:
            # The last entry is that of -1.
            used = np.zeros(len(self._device) + 1, np.bool_)
            used[np.asarray(device_blocks, np.int64).ravel()] = True
            waiting = [transfer for transfer in waiting if used[transfer.device_blocks].any()]
        for transfer in waiting:
            self._streams.wait(CopyStream.COMPUTE, transfer.event)
        # A later swap waits for the compute stream, and so for the transfers removed here.
        self._pending = [transfer for transfer in self._pending if not any(transfer is other for other in waiting)]

    def _swap(self, stream: CopyStream, sources: Sequence[int], destinations: Sequence[int]) -> int:
        source, destination = (self._device, self._host) if stream is CopyStream.OUT else (self._host, self._device)
        for name, ids, pool in (("sources", sources, source), ("destinations", destinations, destination)):
            if len(ids) and not 0 <= min(ids) <= max(ids) < len(pool):
                raise ValueError(f"{name}: block ids must be in [0, {len(pool)}), got {min(ids)} to {max(ids)}")
        copies = runs(sources, destinations)
        if not copies:
            return 0
        device_blocks, host_blocks = (np.array(ids, np.int64) for ids in (sources, destinations))
        if stream is CopyStream.IN:
            device_blocks, host_blocks = host_blocks, device_blocks

        self._remove_done()
        self._streams.wait(stream, self._streams.mark(CopyStream.COMPUTE))
        for other in self._pending:
            # If transfers in opposite directions share a block, one writes a block that the other reads.
            if other.stream is not stream and (
                np.isin(other.device_blocks, device_blocks).any() or np.isin(other.host_blocks, host_blocks).any()
            ):
                self._streams.wait(stream, other.event)
        for run in copies:
            self._streams.copy(
                stream,
                destination[run.destination : run.destination + run.count],
                source[run.source : run.source + run.count],
            )
        self._pending.append(_Transfer(stream, self._streams.mark(stream), device_blocks, host_blocks))
        return len(copies)

    def _remove_done(self) -> None:
        self._pending = [transfer for transfer in self._pending if not self._streams.done(transfer.event)]
