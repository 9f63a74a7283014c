"""The layout of the pools, which manager and executor agree on by name."""

from __future__ import annotations

import torch

from pagekv.executor.backend.layout import LAYOUT
from pagekv.executor.cpu.kv_cache import KvCache
from pagekv.executor.model.loading import BlockGeometry


def test_a_block_is_one_contiguous_slab_over_all_layers() -> None:
    assert LAYOUT == "blocks-first-v1"
    geometry = BlockGeometry(3, 2, 8, torch.float32)
    cache = KvCache(geometry, block_size=4, num_device_blocks=5, num_host_blocks=2)
    for pool in (cache.device, cache.host):
        assert pool[1].is_contiguous()
        assert pool[1].nbytes == geometry.bytes_per_block(4)
