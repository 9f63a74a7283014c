"""CUDA graphs of decode steps: the model's whole forward pass, kernels inside, recorded once per shape and replayed.

A graph reads its inputs where they were when it was recorded and starts as many thread blocks as then. So batches are
filled up to a few sizes, and sections of the upload, tables and work items have the sizes of a `GraphKey`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from pagekv.common.logs import Log
from pagekv.executor.cuda.device import CudaDevice
from pagekv.kernels.attention_plan import GraphKey

log = Log(__name__)

MAX_GRAPH_BATCH = 512
MAX_GRAPHS = 64


def graph_key(num_sequences: int, table_width: int, num_items: int, num_shared: int = 0) -> GraphKey | None:
    """The smallest key that a batch of decodes fits; None when too large for a graph. `num_items`: splits of all rows.
    `num_shared`: decode items of several rows.
    """
    if not 0 < num_sequences <= MAX_GRAPH_BATCH:
        return None
    batch = padded_batch(num_sequences)
    # As few shapes as possible, since each is recorded once: fourfold steps in width, twofold in work.
    width = 16
    while width < table_width:
        width *= 4
    # Rows that fill the batch up have an item each, which writes zeros.
    padded = num_items + batch - num_sequences
    items = batch if num_items == num_sequences else max(2 * batch, next_power(padded))
    # Items of padding cost next to nothing, and without sharing there is no second decode kernel in the graph.
    shared = 0
    while shared < num_shared:
        shared = max(64, 4 * shared)
    return GraphKey(batch, width, items, shared)


def padded_batch(num_sequences: int) -> int:
    """Rows of the graph for so many decodes: rows of padding are computed in vain."""
    return next_power(num_sequences) if num_sequences <= 32 else -(-num_sequences // 32) * 32


def next_power(number: int) -> int:
    """The smallest power of two that is at least `number`, which is above 0."""
    return 1 << (number - 1).bit_length()


class GraphCache:
    """Graphs by shape. The first step of a shape runs as it is, which sets everything up that recording must not meet;
    the second is recorded; later ones are replayed. The least recently used go first.
    """

    def __init__(self, device: CudaDevice, enabled: bool = True) -> None:
        self.enabled = enabled
        self._device = device
        # None: met once.
        self._graphs: OrderedDict[GraphKey, Callable[[], torch.Tensor] | None] = OrderedDict()
        self.num_captured = 0
        self.num_replayed = 0

    def clear(self) -> None:
        """Discards every graph, because memory that graphs read has moved."""
        if self._graphs:
            self._device.synchronize()
        self._graphs.clear()

    def run(self, shape: GraphKey, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `forward`, computed by it or by a graph of an earlier `forward` of the same shape."""
        if shape not in self._graphs:
            self._graphs[shape] = None
            return forward()
        self._graphs.move_to_end(shape)
        graph = self._graphs[shape] or self._record(shape, forward)
        if graph is None:
            return forward()
        self.num_replayed += 1
        return graph()

    def _record(self, shape: GraphKey, forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor] | None:
        """A new graph. None where it cannot be recorded; then all older ones are discarded too."""
        try:
            graph = self._device.capture(forward)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                # The step needs the memory of the graphs there are; shapes still in use are recorded again.
                dropped = len(self._graphs)
                log.warning("no memory to record a CUDA graph: dropping those recorded", graphs=dropped, error=error)
            else:
                log.exception("this model cannot be recorded as a CUDA graph: going on without graphs")
                self.enabled = False
            self.clear()
            return None
        self._graphs[shape] = graph
        self.num_captured += 1
        if len(self._graphs) > MAX_GRAPHS:
            # The graph may still be running.
            self._device.synchronize()
            self._graphs.popitem(last=False)
        return graph
