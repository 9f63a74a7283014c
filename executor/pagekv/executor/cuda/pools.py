"""The block pools of the CUDA backend: keys and values on the device, and pinned host memory to swap with."""

from __future__ import annotations

import math

import numpy.typing as npt
import torch

from pagekv.executor.backend.interface import BlockCopies, CopyDirection
from pagekv.executor.cuda.device import CudaDevice
from pagekv.executor.model.kv_geometry import BlockGeometry
from pagekv.kernels.attention import PagedAttention
from pagekv.kernels.host_memory import host_memory
from pagekv.kernels.swap import BlockSwapper


class HostMemoryError(MemoryError):
    """The host pool cannot be had; the device's could."""


class KvPools:
    """Both `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`. Unwritten slots hold anything.

    States: in use, then closed.
    """

    def __init__(
        self, geometry: BlockGeometry, block_size: int, num_device_blocks: int, num_host_blocks: int, device: CudaDevice
    ) -> None:
        """Raises MemoryError, or HostMemoryError, when the pools cannot be had."""
        self.block_size = block_size
        shape = (geometry.num_layers, 2, block_size, geometry.num_kv_heads, geometry.head_size)
        self._device = device
        try:
            self.device = torch.empty((num_device_blocks, *shape), dtype=geometry.dtype, device=device.torch_device)
        except RuntimeError as error:
            raise MemoryError(
                f"{num_device_blocks} device blocks: {error}; give the manager a smaller --num-device-blocks"
            ) from error
        try:
            self.host = self._host_pool((num_host_blocks, *shape), geometry.dtype)
            self._swapper = BlockSwapper(device.streams, self.device, self.host)
            # Last, so that nothing stays pinned when an earlier line raises.
            if num_host_blocks:
                device.pin(self.host)
        except MemoryError as error:
            raise HostMemoryError(
                f"{num_host_blocks} host blocks: {error}; give the manager a smaller --num-host-blocks, or the "
                "executor more memory"
            ) from error

    @staticmethod
    def _host_pool(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not shape[0]:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(host_memory(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)

    def close(self) -> None:
        """Gives the pinned memory back; nothing may be under way."""
        if len(self.host):
            self._device.unpin(self.host)

    def copy(self, copies: BlockCopies, attention: PagedAttention) -> None:
        """Copies whole blocks, after what was enqueued before; `attention` is over the device pool. Steps that touch
        swapped blocks wait for them in `before_step`.
        """
        if copies.direction is CopyDirection.SWAP_OUT:
            self._swapper.swap_out(copies.sources, copies.destinations)
        elif copies.direction is CopyDirection.SWAP_IN:
            self._swapper.swap_in(copies.sources, copies.destinations)
        else:
            self._swapper.before_compute([*copies.sources, *copies.destinations])
            pairs = self._device.pinned((len(copies.sources), 2), torch.int32)
            pairs.copy_(torch.tensor([copies.sources, copies.destinations], dtype=torch.int32).t())
            attention.copy_blocks(pairs.to(self._device.torch_device, non_blocking=True))

    def before_step(self, blocks: npt.ArrayLike) -> None:
        """Makes later work wait for the swaps under way that touch one of these blocks, and for no other."""
        self._swapper.before_compute(blocks)
