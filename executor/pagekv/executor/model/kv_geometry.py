"""The shape of a model's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """The shape of a model's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * 2 * block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize
