"""Threads, grid and dynamic shared memory of each kernel; they follow the constants of its source."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kernels.prefill_plan import THREADS, prefill_tile
from pagekv.kernels.variants import Variant


@dataclass(frozen=True)
class Geometry:
    """How a kernel is started."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int


def cache_write(variant: Variant, num_tokens: int, num_heads: int, num_kv_heads: int) -> Geometry:
    """One thread block a token."""
    return Geometry((num_tokens, 1, 1), 128, 0)


def block_copy(num_pairs: int, block_bytes: int) -> Geometry:
    """A block of memory is cut into chunks of 16 KiB in y; x walks over the pairs."""
    return Geometry((num_pairs, min(-(-block_bytes // 16384), 65535), 1), 128, 0)


def decode(variant: Variant, num_items: int, num_heads: int, num_kv_heads: int) -> Geometry:
    """One thread block a work item and KV head."""
    return Geometry((num_items, num_kv_heads, 1), 128, 0)


def merge(variant: Variant, num_items: int, num_heads: int) -> Geometry:
    """One thread block a row and query head."""
    return Geometry((num_items, num_heads, 1), 64, 0)


def prefill(variant: Variant, num_items: int, num_heads: int, num_kv_heads: int) -> Geometry:
    """One thread block an item (a tile of query rows) and KV head; the KV heads of an item are neighbours."""
    return Geometry((num_items * num_kv_heads, 1, 1), THREADS, prefill_tile(variant).shared_bytes)
