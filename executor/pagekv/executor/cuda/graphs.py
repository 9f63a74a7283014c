"""CUDA graphs of decode steps: the model's whole forward pass, including kernels, recorded once per shape before the
first step, and then replayed.

A graph always reads its inputs from the same addresses and starts the same number of thread blocks. So batches are
padded to a few sizes, and sections of the upload, block tables and work items have the sizes of a `GraphKey`. A step
uses the smallest graph that it fits; thread blocks without work end at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import IntEnum

import torch

from pagekv.common.logs import Log
from pagekv.executor.cuda.device import CudaDevice
from pagekv.kernels.attention_plan import GraphKey
from pagekv.kernels.decode_plan import LEAST_SPLIT, most_partials

log = Log(__name__)

MAX_GRAPH_BATCH = 512
# Most int32 entries of a graph's block tables: 8 MiB, which every step of its shape uploads.
MAX_TABLE_ENTRIES = 2**21
# Sequences that share prefixes may together have more keys than the pool: a graph has room for this many times as many.
MOST_SHARERS = 4
ANOTHER = "another rank cannot record it"


def graph_key(num_sequences: int, table_width: int, num_items: int, num_shared: int = 0) -> GraphKey | None:
    """The smallest key that a batch of decodes fits; None if it is too large for a graph. `num_items`: splits of all
    rows together. `num_shared`: work items that serve several rows.
    """
    if not 0 < num_sequences <= MAX_GRAPH_BATCH:
        return None
    batch = padded_batch(num_sequences)
    # Every row of padding has one item, which writes zeros.
    padded = num_items + batch - num_sequences
    items = batch if num_items == num_sequences else max(2 * batch, next_power(padded))
    return GraphKey(batch, graph_width(table_width), items, graph_shared(num_shared))


def fits(needed: GraphKey, key: GraphKey) -> bool:
    """Whether a step whose smallest shape is `needed` fits a graph of shape `key`."""
    return key.batch == needed.batch and all(
        getattr(key, field.name) >= getattr(needed, field.name) for field in fields(GraphKey)
    )


def graph_width(table_width: int) -> int:
    """The width of a graph's block tables for tables of this width, in steps of factor 4 to keep the shapes few."""
    width = 16
    while width < table_width:
        width *= 4
    return width


def graph_shared(num_shared: int) -> int:
    """A graph's room for this many shared items, in coarse steps, since unused items cost next to nothing. 0 without
    sharing: the graph then has no second decode kernel.
    """
    room = 0
    while room < num_shared:
        room = max(64, 4 * room)
    return room


def padded_batch(num_sequences: int) -> int:
    """The batch size of the graph for this many decodes. Rows of padding are computed in vain."""
    return next_power(num_sequences) if num_sequences <= 32 else -(-num_sequences // 32) * 32


def next_power(number: int) -> int:
    """The smallest power of two that is at least `number`, which is above 0."""
    return 1 << (number - 1).bit_length()


def ladder(
    max_sequences: int, num_tokens: int, max_tokens: int, block_size: int, *, window: int = 0, most_members: int = 1
) -> list[GraphKey]:
    """The shapes to record, largest batch first: for every batch size, each table width up to that of a sequence of
    `max_tokens`, with as many work items as contexts of that width need.

    `num_tokens`: tokens of the device pool, which bound the number of items; steps whose sequences share more than that
    have no shape. `window`: the widest window of any layer. `most_members`: the most rows that share one read; above 1,
    each shape with several splits is recorded a second time, with room for shared items.
    """
    counts = range(1, min(max_sequences, MAX_GRAPH_BATCH) + 1)
    widest = graph_width(-(-max_tokens // block_size))
    keys = []
    for batch in sorted({padded_batch(count) for count in counts}, reverse=True):
        width = graph_width(1)
        while width <= widest and batch * width <= MAX_TABLE_ENTRIES:
            splits = max(most_partials(min(width * block_size, max_tokens), window), 1)
            bound = num_tokens // LEAST_SPLIT + 2 * batch
            items = batch if splits == 1 else max(2 * batch, next_power(min(batch * splits, bound)))
            keys.append(GraphKey(batch, width, items))
            if splits > 1 and min(batch, most_members) > 1:
                shared = graph_shared(-(-batch // most_members) * splits)
                items = max(2 * batch, next_power(min(batch * splits, MOST_SHARERS * bound)))
                keys.append(GraphKey(batch, width, items, shared))
            width *= 4
    return keys


class Recorded(IntEnum):
    """The outcome of recording a shape, from worst to best: the model cannot be recorded, memory is short, or there is
    a graph.
    """

    NEVER = 0
    NO_MEMORY = 1
    YES = 2


class GraphCache:
    """Graphs by shape. All are recorded before the first step, because a recording waits for the device."""

    def __init__(
        self,
        device: CudaDevice,
        enabled: bool = True,
        agree: Callable[[Recorded, Exception | None], Recorded] = lambda own, _: own,
    ) -> None:
        """`agree`: turns this rank's outcome of a recording into the worst outcome of all ranks of the group. Its
        second argument is this rank's error, if any.
        """
        self.enabled = enabled
        self._agree = agree
        self._device = device
        self._graphs: dict[GraphKey, Callable[[], torch.Tensor]] = {}
        self._of_batch: defaultdict[int, list[GraphKey]] = defaultdict(list)
        self.num_captured = 0
        # Shapes that should have been recorded and were not.
        self.num_failed = 0
        self.num_replayed = 0

    def record(
        self, keys: Sequence[GraphKey], forward_of: Callable[[GraphKey], Callable[[], torch.Tensor]], reserve: int = 0
    ) -> None:
        """Records a graph of the function `forward_of(key)` for each shape. A failure is logged as an error and
        counted, and the steps concerned run without a graph: all steps if the model cannot be recorded, those of the
        remaining shapes if memory is short. `reserve`: bytes of device memory that must be free after the recordings.
        """
        # First checks that memory suffices: a rank that ran out of memory in the run before its first recording would
        # leave other ranks in its collectives. Each later recording begins with `reserve` bytes free.
        short = self._shortage(reserve)
        if self._agree(Recorded.NO_MEMORY if short else Recorded.YES, None) is Recorded.NO_MEMORY:
            self._end_short(0, len(keys), short)
            return
        for number, key in enumerate(keys):
            own, why = self._record(key, forward_of, reserve)
            # Either all ranks have this graph or none: collectives in a graph have the size of its padded batch.
            found = self._agree(own, why)
            if found is Recorded.NO_MEMORY:
                self._graphs.pop(key, None)
                self._end_short(number, len(keys) - number, why)
                return
            if found is Recorded.NEVER:
                self._device.synchronize()
                self._graphs.clear()
                self._of_batch.clear()
                self.num_captured, self.num_failed = 0, len(keys)
                log.error(
                    "this model cannot be recorded as CUDA graphs: all steps run without, slower",
                    exc_info=why or RuntimeError(ANOTHER),
                )
                return
            self._of_batch[key.batch].append(key)
            self.num_captured += 1

    def _record(
        self, key: GraphKey, forward_of: Callable[[GraphKey], Callable[[], torch.Tensor]], reserve: int
    ) -> tuple[Recorded, RuntimeError | None]:
        try:
            self._graphs[key] = self._device.capture(forward_of(key))
            if short := self._shortage(reserve):
                raise short
        except torch.OutOfMemoryError as error:
            return Recorded.NO_MEMORY, error
        except RuntimeError as error:
            return Recorded.NEVER, error
        return Recorded.YES, None

    def _shortage(self, reserve: int) -> torch.OutOfMemoryError | None:
        if self._device.available_bytes() >= reserve:
            return None
        return torch.OutOfMemoryError(f"steps need {reserve} bytes beside the graphs")

    def _end_short(self, recorded: int, failed: int, why: RuntimeError | None) -> None:
        self.num_failed = failed
        log.error(
            "no memory to record more CUDA graphs: steps of the shapes left run without, slower",
            recorded=recorded,
            failed=failed,
            error=why or ANOTHER,
        )

    def find(self, needed: GraphKey) -> GraphKey | None:
        """The smallest shape with a graph that fits a step of shape `needed`; None if there is none."""
        fitting = [key for key in self._of_batch[needed.batch] if fits(needed, key)]
        return min(fitting, key=lambda key: (key.wide_items, key.items, key.table_width), default=None)

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Enqueues the graph of a shape, which must have one, and returns its result."""
        self.num_replayed += 1
        return self._graphs[key]()
