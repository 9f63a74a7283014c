"""The sizes of each kernel's launch (threads, grid and dynamic shared memory), which follow from the constants of its
source; and the interface of a launcher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagekv.kernels.decode_plan import decode_tile
from pagekv.kernels.params import Struct
from pagekv.kernels.prefill_plan import prefill_tile, wgmma_tile
from pagekv.kernels.variants import Variant

DEALT = True
"""Whether thread blocks of decodes take one item after the other; else each has one item."""


@dataclass(frozen=True)
class LaunchConfig:
    """Size of a launch."""

    grid: tuple[int, int, int]
    """Thread blocks in x, y, z, each at least 1."""
    threads: int
    """Threads of a thread block, a multiple of 32."""
    shared_bytes: int
    """Dynamic shared memory of a thread block."""
    dealt: bool = False
    """Whether thread blocks take work until none is left. Then no more of them start than can run at a time."""


class Launcher(Protocol):
    """Starts kernels: CuPy on a GPU, or the tests' emulation on the CPU. Callers have validated all arguments."""

    def launch(self, kernel: str, variant: Variant, config: LaunchConfig, params: Struct) -> None:
        """Starts `kernel` (a name of `variants.KERNELS`) on the current stream and returns without waiting for it.

        `params`: the kernel's structure, from `params.fill`; addresses are the device's.
        """
        ...


def cache_write(variant: Variant, num_tokens: int, num_heads: int) -> LaunchConfig:
    """A thread has 16 bytes of a head, a thread block whole heads of a token. `num_heads`: the KV heads, and the query
    heads if queries change."""
    heads = 128 // (variant.head_size * variant.element_bytes // 16)
    return LaunchConfig((num_tokens, -(-num_heads // heads), 1), 128, 0)


def cache_write_together(num_tokens: int) -> LaunchConfig:
    """A thread block has all queries of a token, or all its keys."""
    return LaunchConfig((num_tokens, 2, 1), 128, 0)


def add_norm(num_rows: int, row_bytes: int) -> LaunchConfig:
    """One thread block a row; a thread has 16 bytes at a time."""
    return LaunchConfig((num_rows, 1, 1), min(256, -(-row_bytes // 512) * 32), 0)


def gated(num_rows: int, row_bytes: int) -> LaunchConfig:
    """A thread has 16 bytes of a row, 4 KiB a thread block; x walks over the rows."""
    return LaunchConfig((num_rows, -(-row_bytes // 4096), 1), 256, 0)


def sample(num_rows: int) -> LaunchConfig:
    """One thread block a row of logits."""
    return LaunchConfig((num_rows, 1, 1), 512, 0)


def adjust(num_rows: int, vocab_size: int) -> LaunchConfig:
    """A thread block has 2,048 logits of a row; x walks over the rows."""
    return LaunchConfig((num_rows, -(-vocab_size // 2048), 1), 256, 0)


def block_copy(num_pairs: int, block_bytes: int) -> LaunchConfig:
    """A block of memory is cut into chunks of 16 KiB in y; x walks over the pairs."""
    return LaunchConfig((num_pairs, min(-(-block_bytes // 16384), 65535), 1), 128, 0)


def decode(variant: Variant, num_items: int, num_heads: int, num_kv_heads: int, *, wide: bool = False) -> LaunchConfig:
    """One thread block for each item, KV head and tile of its query heads. If they cannot all run at a time, those that
    run go on to further items. The KV heads of an item are neighbours. `wide`: for `pagekv_decode_wide`."""
    tile = decode_tile(variant, wide=wide)
    blocks = num_items * num_kv_heads * -(-num_heads // num_kv_heads // tile.rows)
    return LaunchConfig((blocks, 1, 1), tile.threads, tile.shared_bytes, dealt=DEALT)


def merge(variant: Variant, num_items: int, num_heads: int) -> LaunchConfig:
    """One thread block a row and query head; a warp has 16 dims."""
    return LaunchConfig((num_items, num_heads, 1), variant.head_size * 2, 0)


def merge_rows(variant: Variant, num_items: int, num_heads: int) -> LaunchConfig:
    """A thread has four dims of a query head; x walks over the rows."""
    pieces = num_heads * variant.head_size // 4
    return LaunchConfig((num_items, -(-pieces // 256), 1), 256, 0)


def prefill(variant: Variant, num_items: int, num_kv_heads: int, *, wgmma: bool = False) -> LaunchConfig:
    """One thread block an item (a tile of query rows, or a split of one) and KV head; the KV heads of an item are
    neighbours. `wgmma`: for `pagekv_prefill_wgmma`."""
    tile = wgmma_tile(variant) if wgmma else prefill_tile(variant)
    return LaunchConfig((num_items * num_kv_heads, 1, 1), tile.threads, tile.shared_bytes)
