"""The simulation of the decode kernel's thread blocks: what is known of it without simulating."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate_decode import BF16, FP8, Gpu, Kernel, simulate

GPU = Gpu()


def test_one_tile_takes_the_sum_of_its_parts() -> None:
    slots = BF16.instructions / GPU.clock
    parts = GPU.first_instruction + BF16.begin + GPU.latency + slots * BF16.alone + BF16.end
    # 64 requests over 96 channels: some channel serves a few of them.
    service = GPU.request * GPU.channels / GPU.rate
    assert parts + service <= simulate(BF16, [1]) <= parts + 8 * service + 100


def test_bytes_take_their_time_and_many_items_little_more() -> None:
    items = [4] * 4096
    bytes_alone = sum(items) * BF16.tile_bytes / GPU.rate
    assert bytes_alone < simulate(BF16, items) < 1.15 * bytes_alone


@pytest.mark.parametrize("kernel", [BF16, FP8, replace(FP8, stages=4)], ids=lambda kernel: kernel.name)
def test_every_tile_is_asked_for_once_with_and_without_overlap(kernel: Kernel) -> None:
    """A device with one channel and no latency is busy for just the bytes of all tiles."""
    gpu = Gpu(multiprocessors=2, channels=1, rate=1.0, latency=0.0)
    items = [1, 4, 7, 2, 4, 4, 3, 8, 5, 1, 1, 6, 4]
    bytes_alone = sum(items) * kernel.tile_bytes
    for ahead in (0, kernel.stages - 1):
        took = simulate(replace(kernel, ahead=ahead), items, gpu)
        assert bytes_alone < took < bytes_alone + 20_000, ahead


def test_overlap_gains_where_one_block_has_a_multiprocessor_to_itself() -> None:
    alone = replace(FP8, blocks=1, stages=4)
    items = [4] * 1056
    assert simulate(replace(alone, ahead=2), items) < 0.8 * simulate(alone, items)
