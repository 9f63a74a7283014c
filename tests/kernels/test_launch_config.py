"""Grids of the kernels; launchers of a GPU and of the emulation are called alike."""

from __future__ import annotations

import inspect

import pytest
from support.kernels.host_build import HostLauncher

from pagekv.kernels import launch_config
from pagekv.kernels.cupy_launcher import CupyLauncher
from pagekv.kernels.launch_config import Launcher
from pagekv.kernels.variants import Variant

HALF = Variant("float16", "float16", 128)


@pytest.mark.parametrize(
    ("items", "heads", "kv_heads", "wide", "blocks"),
    [
        (5, 32, 8, False, 40),  # a thread block an item and KV head
        (5, 64, 1, True, 5),  # 64 query heads fit one wide thread block
        (5, 71, 1, True, 10),  # more do not
        (4096, 32, 8, False, 32768),  # the launcher starts no more than run at a time
    ],
)
def test_a_decode_has_a_thread_block_for_each_item_kv_head_and_tile_of_heads(
    items: int, heads: int, kv_heads: int, wide: bool, blocks: int
) -> None:
    config = launch_config.decode(HALF, items, heads, kv_heads, wide=wide)
    assert (config.grid, config.dealt) == ((blocks, 1, 1), True)


def test_other_grids() -> None:
    assert launch_config.cache_write(HALF, 7, 40).grid == (7, 5, 1)
    assert launch_config.cache_write(Variant("float16", "float16", 80), 7, 13).grid == (7, 2, 1)
    assert launch_config.cache_write_together(7).grid == (7, 2, 1)
    assert launch_config.prefill(HALF, 3, 8).grid == (24, 1, 1)
    assert launch_config.prefill(HALF, 3, 8, wgmma=True).grid == (24, 1, 1)
    assert launch_config.merge(HALF, 3, 32).grid == (3, 32, 1)
    assert launch_config.merge_rows(HALF, 3, 32).grid == (3, 4, 1)
    assert launch_config.merge_rows(Variant("float32", "float32", 80), 3, 5).grid == (3, 1, 1)
    assert launch_config.block_copy(3, 16385).grid == (3, 2, 1)
    assert launch_config.block_copy(3, 1 << 40).grid == (3, 65535, 1)  # the most that CUDA allows in y


def test_a_merge_has_a_warp_for_16_dims() -> None:
    assert [launch_config.merge(Variant("float32", "float32", size), 1, 1).threads for size in (64, 80, 256)] == [
        128,
        160,
        512,
    ]


@pytest.mark.parametrize("implementation", [CupyLauncher, HostLauncher])
def test_launch_takes_what_the_interface_says(implementation: type) -> None:
    assert inspect.signature(implementation.launch) == inspect.signature(Launcher.launch)  # type: ignore[attr-defined]  # of two classes
