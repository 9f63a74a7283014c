"""The block pools of the CUDA backend: the device pool, and the host pool in pinned memory for swaps."""

from __future__ import annotations

import math

import torch

from pagekv.executor.backend.interface import BlockCopies, CopyDirection
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.machine import available_bytes
from pagekv.executor.model.loading import BlockGeometry
from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.host_memory import host_memory
from pagekv.kernels.swap import BlockSwapper


class KvPools:
    """Device and host pool, both `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`, zero at first.

    States: without host blocks, with them after `add_host_pool`, then closed.
    """

    def __init__(self, geometry: BlockGeometry, block_size: int, num_device_blocks: int, device: CudaDevice) -> None:
        """Raises MemoryError when the device pool cannot be allocated."""
        self.block_size = block_size
        shape = (num_device_blocks, geometry.num_layers, 2, block_size, geometry.num_kv_heads, geometry.head_size)
        self._device = device
        try:
            self.device = torch.empty(shape, dtype=geometry.dtype, device=device.torch_device)
        except RuntimeError as error:
            raise MemoryError(
                f"{num_device_blocks} device blocks: {error}; give the manager a smaller --num-device-blocks"
            ) from error
        # Zeroed asynchronously. As bytes, since torch cannot fill every element type.
        self.device.view(torch.uint8).zero_()
        self.host = torch.empty((0, *shape[1:]), dtype=geometry.dtype)
        self.swapper = BlockSwapper(device.streams, self.device, self.host)

    def add_host_pool(self, num_blocks: int) -> None:
        """Allocates and pins the host pool. Raises MemoryError, with nothing pinned, when that fails."""
        shape = (num_blocks, *self.device.shape[1:])
        size, available = math.prod(shape) * self.device.itemsize, available_bytes()
        try:
            if size > available:
                raise MemoryError(f"they need {size} bytes; {available} are available")
            host = torch.from_numpy(host_memory(size)).view(self.device.dtype).view(shape)
            self._device.pin(host)
        except MemoryError as error:
            raise MemoryError(
                f"{num_blocks} host blocks: {error}; give the manager a smaller --num-host-blocks, or the executor "
                "more memory"
            ) from error
        self.host = host
        self.swapper = BlockSwapper(self._device.streams, self.device, host)

    def close(self) -> None:
        """Unpins the host pool. No copy may be under way."""
        if len(self.host):
            self._device.unpin(self.host)

    def copy(self, copies: BlockCopies, attention: PagedAttention) -> None:
        """Enqueues copies of whole blocks after all work enqueued before. `attention`: over the device pool. Steps that
        use swapped blocks wait for the swaps (`swapper.before_compute`).
        """
        if copies.direction is CopyDirection.SWAP_OUT:
            self.swapper.swap_out(copies.sources, copies.destinations)
        elif copies.direction is CopyDirection.SWAP_IN:
            self.swapper.swap_in(copies.sources, copies.destinations)
        else:
            self.swapper.before_compute([*copies.sources, *copies.destinations])
            pairs = self._device.pinned((len(copies.sources), 2), torch.int32)
            pairs.copy_(torch.tensor([copies.sources, copies.destinations], dtype=torch.int32).t())
            attention.copy_blocks(pairs.to(self._device.torch_device, non_blocking=True))
