"""The block pools of the CPU backend: keys and values of every layer, by block."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import numpy as np
import torch

from pagekv.executor.backend.interface import BlockCopies, CopyDirection
from pagekv.executor.model.loading import BlockGeometry

# While idle, pages of the device pool after the last written block are populated, PIECE_BYTES at a time: a quarter of
# the pool, but at least LEAST_AHEAD_BYTES and at most MOST_AHEAD_BYTES. In a virtual machine whose host first has to
# find fresh pages, page faults cost a tenth of the serving time. On an AMD EPYC (family 25, model 17) they take 2.2 s a
# GiB: rounds of 32 requests, which write 118 MB each, took 2.56 s without a pause between them, and 2.33 s with enough
# populated pages.
LEAST_AHEAD_BYTES, MOST_AHEAD_BYTES, PIECE_BYTES = 2**28, 2**30, 2**21
# Bytes that one operator copies. It needs a temporary of the same size, and memory might be short for all of a large
# swap.
COPIED_BYTES = 2**27
# MADV_POPULATE_WRITE of linux/mman.h; Python has no name for it.
_POPULATE_WRITE = 23


class KvCache:
    """Device and host pool, both `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`, zero at first.

    The device pool has one block more than sequences get: the null block. It stays zero, and padding reads it, so that
    padding is finite.
    """

    def __init__(
        self, geometry: BlockGeometry, block_size: int, num_device_blocks: int, num_host_blocks: int = 0
    ) -> None:
        """Raises MemoryError when the pools cannot be allocated."""
        self.geometry = geometry
        self.block_size = block_size
        self.null_block = num_device_blocks
        shape = (geometry.num_layers, 2, block_size, geometry.num_kv_heads, geometry.head_size)
        try:
            self.device = _zeros((num_device_blocks + 1, *shape), geometry.dtype)
            self.host = _zeros((num_host_blocks, *shape), geometry.dtype)
        except (OSError, OverflowError) as error:
            raise MemoryError(
                f"{num_device_blocks} device and {num_host_blocks} host blocks: {error}: lower --kv-memory, or the "
                "manager's --num-device-blocks and --num-host-blocks"
            ) from error
        # Views per layer, [num_blocks, block_size, num_kv_heads, head_size]; blocks of one layer are strided.
        self._layers = [(self.device[:, layer, 0], self.device[:, layer, 1]) for layer in range(geometry.num_layers)]
        # The same views with one row per block, [num_blocks, row].
        self._flat_layers = [(keys.flatten(1), values.flatten(1)) for keys, values in self._layers]
        self._row = block_size * geometry.num_kv_heads * geometry.head_size
        self._gathered = torch.empty(0, dtype=geometry.dtype)
        # Leading bytes of the device pool that were written, and whose pages are populated.
        self._written = self._prepared = 0

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of the keys and values of one block in one layer."""
        return self.geometry.bytes_per_block(self.block_size) // self.geometry.num_layers

    def copy(self, copies: BlockCopies) -> None:
        """Copies whole blocks; no destination is a source of another pair."""
        source = self.host if copies.direction is CopyDirection.SWAP_IN else self.device
        destination = self.host if copies.direction is CopyDirection.SWAP_OUT else self.device
        at_once = max(1, COPIED_BYTES // self.geometry.bytes_per_block(self.block_size))
        pairs = torch.tensor([copies.sources, copies.destinations], dtype=torch.int64)
        # Indexing with a tensor makes a new tensor, so `destination[ids].copy_(...)` would write into a temporary.
        for sources, destinations in pairs.split(at_once, 1):
            destination.index_copy_(0, destinations, source[sources])
        if destination is self.device:
            self.reached(max(copies.destinations, default=-1))

    def write(
        self, layer: int, slots: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores keys and values `[T, num_kv_heads, head_size]` in slots: block ids `[T]` and offsets in them `[T]`."""
        layer_keys, layer_values = self._layers[layer]
        layer_keys.index_put_(slots, keys)
        layer_values.index_put_(slots, values)

    def reached(self, block: int) -> None:
        """Notes that this block of the device pool is written. The manager hands out fresh blocks in order."""
        self._written = max(self._written, (block + 1) * self.geometry.bytes_per_block(self.block_size))

    def prepare(self) -> bool:
        """Populates PIECE_BYTES of the pages that will be written next. True while more pages are to be populated."""
        ahead = min(max(self.device.nbytes // 4, LEAST_AHEAD_BYTES), MOST_AHEAD_BYTES)
        end = min(self.device.nbytes, self._written + ahead)
        self._prepared = max(self._prepared, self._written - self._written % PIECE_BYTES)
        if self._prepared >= end:
            return False
        # Populated pages keep their content. Called through ctypes, which releases the GIL; mmap.madvise does not.
        piece = min(PIECE_BYTES, self.device.nbytes - self._prepared)
        begin = self.device.data_ptr() + self._prepared
        if ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(piece), _POPULATE_WRITE):
            # Gives up: a kernel before 5.14 does not know the advice, or memory is short.
            self._prepared = self.device.nbytes
        else:
            self._prepared += piece
        return self._prepared < end

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each `[num_blocks, block_size, num_kv_heads, head_size]`; blocks are strided."""
        return self._layers[layer]

    def gather(
        self, layer: int, blocks: torch.Tensor, unwritten: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks `[n]`, each `[n * block_size, num_kv_heads, head_size]`. `unwritten`: slots to
        zero, as indices into keys and then values, `[2 * n * block_size]`.

        The next call overwrites the result: all calls share one buffer, because fresh memory costs a page fault every
        4 KiB.
        """
        count, geometry = blocks.shape[0], self.geometry
        size = count * self._row
        if self._gathered.numel() < 2 * size:
            self._gathered = torch.empty(2 * size, dtype=geometry.dtype)
        both = self._gathered[: 2 * size].view(2, count, self._row)
        layer_keys, layer_values = self._flat_layers[layer]
        torch.index_select(layer_keys, 0, blocks, out=both[0])
        torch.index_select(layer_values, 0, blocks, out=both[1])
        slots = both.view(2, count * self.block_size, geometry.num_kv_heads, geometry.head_size)
        if unwritten is not None:
            slots.flatten(0, 1).index_fill_(0, unwritten, 0)
        return slots[0], slots[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in pages that the kernel allocates and clears when they are first touched. `torch.zeros` would write every
    page (5 GiB took 19 s), and `torch.empty` may return the contents of freed pools.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Decodes read blocks all over the pool, with huge pages 1.1 times as fast. Some kernels have no huge pages.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8, size)).view(dtype).view(shape)
