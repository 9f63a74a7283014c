"""CUDA graphs of decode steps: the model's whole forward pass, kernels inside, recorded once per shape before the first
step, and replayed.

A graph reads its inputs where they were when it was recorded and starts as many thread blocks as then. So batches are
filled up to a few sizes, and sections of the upload, tables and work items have the sizes of a `GraphKey`. A step takes
the smallest graph that it fits; what work is beyond the step's ends at once.
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
# int32 entries of the block tables that a graph reads: 8 MiB, which every step of its shape uploads.
MAX_TABLE_ENTRIES = 2**21
# A graph has room for sequences that together have this many times the keys of the pool, if they share them.
MOST_SHARERS = 4
ANOTHER = "another rank cannot record it"


def graph_key(num_sequences: int, table_width: int, num_items: int, num_shared: int = 0) -> GraphKey | None:
    """The smallest key that a batch of decodes fits; None when too large for a graph. `num_items`: splits of all rows.
    `num_shared`: decode items of several rows.
    """
    if not 0 < num_sequences <= MAX_GRAPH_BATCH:
        return None
    batch = padded_batch(num_sequences)
    # Rows that fill the batch up have an item each, which writes zeros.
    padded = num_items + batch - num_sequences
    items = batch if num_items == num_sequences else max(2 * batch, next_power(padded))
    return GraphKey(batch, graph_width(table_width), items, graph_shared(num_shared))


def fits(needed: GraphKey, key: GraphKey) -> bool:
    """Whether a step whose smallest shape is `needed` fits a graph of shape `key`."""
    return key.batch == needed.batch and all(
        getattr(key, field.name) >= getattr(needed, field.name) for field in fields(GraphKey)
    )


def graph_width(table_width: int) -> int:
    """Width of the tables of a graph for tables of this width: as few shapes as possible, in fourfold steps."""
    width = 16
    while width < table_width:
        width *= 4
    return width


def graph_shared(num_shared: int) -> int:
    """Room of a graph for so many items of several rows: items of padding cost next to nothing, and without sharing
    there is no second decode kernel in the graph.
    """
    room = 0
    while room < num_shared:
        room = max(64, 4 * room)
    return room


def padded_batch(num_sequences: int) -> int:
    """Rows of the graph for so many decodes: rows of padding are computed in vain."""
    return next_power(num_sequences) if num_sequences <= 32 else -(-num_sequences // 32) * 32


def next_power(number: int) -> int:
    """The smallest power of two that is at least `number`, which is above 0."""
    return 1 << (number - 1).bit_length()


def ladder(
    max_sequences: int, num_tokens: int, max_tokens: int, block_size: int, *, window: int = 0, most_members: int = 1
) -> list[GraphKey]:
    """The shapes to record, largest batch first: every batch up to the largest that a graph has, with tables of each
    width up to that of a sequence of `max_tokens`, and with as many work items as such contexts have. `num_tokens`: of
    the device pool, which bounds the items, so that steps whose sequences share more than that have no shape.
    `window`: the widest of any layer. `most_members`: rows that may share a read; above 1 each shape with several
    splits comes a second time, with room for what a common prefix is read by.
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
    """The end of an attempt to record a shape, the worst first: the model cannot be recorded, memory is short, or there
    is a graph.
    """

    NEVER = 0
    NO_MEMORY = 1
    YES = 2


class GraphCache:
    """Graphs by shape, all recorded before a step is run: a recording waits for the device."""

    def __init__(
        self,
        device: CudaDevice,
        enabled: bool = True,
        agree: Callable[[Recorded, Exception | None], Recorded] = lambda own, _: own,
    ) -> None:
        """`agree`: the worst that recording a shape came to on any rank of a group, which all tell each other; it gets
        what this rank failed by, too.
        """
        self.enabled = enabled
        self._agree = agree
        self._device = device
        self._graphs: dict[GraphKey, Callable[[], torch.Tensor]] = {}
        self._of_batch: defaultdict[int, list[GraphKey]] = defaultdict(list)
        self.num_captured = 0
        # Shapes that were to be recorded and were not.
        self.num_failed = 0
        self.num_replayed = 0

    def record(
        self, keys: Sequence[GraphKey], forward_of: Callable[[GraphKey], Callable[[], torch.Tensor]], reserve: int = 0
    ) -> None:
        """Records a graph for each shape, of what `forward_of` returns for it. A failure is logged as an error and
        counted, and steps of its shape run without a graph: all shapes where the model cannot be recorded,
        those left where memory is short. `reserve`: bytes of the device that must be left when all is recorded.
        """
        # A rank that ran out of memory in the run before its first recording would leave others in its collectives. All
        # later ones begin with what the one before had to leave.
        short = self._shortage(reserve)
        if self._agree(Recorded.NO_MEMORY if short else Recorded.YES, None) is Recorded.NO_MEMORY:
            self._end_short(0, len(keys), short)
            return
        for number, key in enumerate(keys):
            own, why = self._record(key, forward_of, reserve)
            # A rank without a graph that another one has would come to collectives of another size.
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
        """The smallest shape with a graph that a step of shape `needed` fits; None where there is none."""
        fitting = [key for key in self._of_batch[needed.batch] if fits(needed, key)]
        return min(fitting, key=lambda key: (key.wide_items, key.items, key.table_width), default=None)

    def replay(self, key: GraphKey) -> torch.Tensor:
        """Enqueues the graph of a shape that has one, and returns what it computes."""
        self.num_replayed += 1
        return self._graphs[key]()
