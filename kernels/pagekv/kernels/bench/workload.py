"""The cases that are measured: shapes, and the least bytes and operations of each. Imports neither torch nor CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pagekv.kernels.variants import DTYPE_BYTES

HEAD_SIZE = 128
BLOCK_SIZE = 16
ELEMENT_BYTES = 2  # bfloat16
NUM_LAYERS, KV_HEADS = 32, 8  # Llama 3 8B: its blocks are copied

MIB, GIB = 1 << 20, 1 << 30
MIN_LAYERS = 2
"""Rounds of a measurement take turns on at least this many layers, so that no round finds its keys in the cache."""


@dataclass(frozen=True)
class Heads:
    """Query heads and KV heads."""

    name: str
    num_heads: int
    num_kv_heads: int


MHA = Heads("MHA", 32, 32)
GQA4 = Heads("GQA 4", 32, KV_HEADS)
GQA8 = Heads("GQA 8", 64, 8)
MQA = Heads("MQA", 32, 1)
RATIOS = (MHA, GQA4, GQA8, MQA)


@dataclass(frozen=True)
class AttentionCase:
    """Attention of the last `new` of `context` visible tokens, in each of `batch` sequences. With `new` 1 it is a
    decode, else a prompt."""

    heads: Heads
    batch: int
    context: int
    new: int = 1
    block_size: int = BLOCK_SIZE
    kv_dtype: str = "bfloat16"
    shared: int = 0
    """Leading tokens, in whole blocks, that all sequences share."""

    @property
    def contexts(self) -> np.ndarray:
        """int32 [batch]: visible tokens of each sequence."""
        return np.full(self.batch, self.context, np.int32)

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences, shared ones once."""
        width, shared = -(-int(self.contexts.max()) // self.block_size), self.shared // self.block_size
        return shared + self.batch * (width - shared)

    def tables(self, blocks: np.ndarray) -> np.ndarray:
        """int32 [batch, width]: block tables over `blocks` [num_blocks]."""
        shared = self.shared // self.block_size
        own = blocks[shared:].reshape(self.batch, -1)
        return np.concatenate([np.tile(blocks[:shared], (self.batch, 1)), own], axis=1).astype(np.int32)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer, shared ones once."""
        tokens = self.shared + self.batch * (self.context - self.shared)
        return 2 * tokens * self.heads.num_kv_heads * HEAD_SIZE * DTYPE_BYTES[self.kv_dtype]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the arena that the case needs at least."""
        return MIN_LAYERS * self.kv_bytes

    @property
    def bytes(self) -> int:
        """Keys and values read, queries read, outputs written; each once."""
        return self.kv_bytes + 2 * self.batch * self.new * self.heads.num_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def flops(self) -> int:
        """Two products of two operations for every visible pair of query and key, and element of a head."""
        visible = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * HEAD_SIZE * self.heads.num_heads * self.batch * visible

    def __str__(self) -> str:
        words = [f"{self.heads.name}, {self.batch} x {count(self.context if self.new == 1 else self.new)}"]
        if 1 < self.new < self.context:
            words[0] += f" behind {count(self.context - self.new)}"
        words += ["fp8"] if self.kv_dtype != "bfloat16" else []
        words += [f"{count(self.shared)} shared"] if self.shared else []
        words += [f"block size {self.block_size}"] if self.block_size != BLOCK_SIZE else []
        return ", ".join(words)


@dataclass(frozen=True)
class WriteCase:
    """Keys and values of `tokens` new tokens of one layer."""

    heads: Heads
    tokens: int

    @property
    def bytes(self) -> int:
        """Read and written."""
        return 2 * self.tokens * 2 * self.heads.num_kv_heads * HEAD_SIZE * ELEMENT_BYTES

    def __str__(self) -> str:
        return f"{self.heads.name}, {count(self.tokens)} tokens"


@dataclass(frozen=True)
class BlockCopyCase:
    """Copy-on-write of `blocks` blocks of NUM_LAYERS layers in one launch."""

    heads: Heads
    blocks: int

    @property
    def bytes(self) -> int:
        """Read and written."""
        return 2 * self.blocks * block_bytes(self.heads.num_kv_heads)

    def __str__(self) -> str:
        return f"copy of {self.blocks} blocks of {block_bytes(self.heads.num_kv_heads) / MIB:g} MiB"


def block_bytes(num_kv_heads: int, block_size: int = BLOCK_SIZE) -> int:
    """Keys and values of one block, all layers."""
    return NUM_LAYERS * 2 * block_size * num_kv_heads * HEAD_SIZE * ELEMENT_BYTES


def count(number: int) -> str:
    """65536 -> 64k."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def decode_cases() -> Iterator[AttentionCase]:
    """Batch 1 to 256, context 256 to 64k, every head ratio; then fp8, other block sizes, and prefixes that all
    sequences share."""
    for heads in RATIOS:
        for batch in (1, 8, 64, 256):
            for context in (256, 1024, 4096, 16384, 65536):
                yield AttentionCase(heads, batch, context)
    for batch, context in ((64, 1024), (256, 1024), (64, 4096), (64, 16384)):
        yield AttentionCase(GQA4, batch, context, kv_dtype="float8_e4m3fn")
    for block_size in (1, 64, 256):
        yield AttentionCase(GQA4, 64, 4096, block_size=block_size)
    for heads in (MHA, GQA4, GQA8):
        yield AttentionCase(heads, 64, 2560, shared=2048)


def prefill_cases() -> Iterator[AttentionCase]:
    """Prompts of 512 to 16k tokens, then chunks behind a cached prefix."""
    for heads in (MHA, GQA4):
        for new in (512, 1024, 2048, 4096, 8192, 16384):
            yield AttentionCase(heads, max(1, 8192 // new), new, new)
    for cached in (4096, 16384, 65536):
        for new in (32, 512, 2048):
            yield AttentionCase(GQA4, 1, cached + new, new)


def write_cases() -> list[WriteCase]:
    """Decodes of 1, 64 and 256 sequences, then prompts of 2k and 8k tokens."""
    return [WriteCase(GQA4, tokens) for tokens in (1, 64, 256, 2048, 8192)]


def block_copy_cases() -> list[BlockCopyCase]:
    """A fork of a few sequences, and of many."""
    return [BlockCopyCase(GQA4, blocks) for blocks in (16, 128)]


# Stage -> the share of the time after which it begins no more cases. The next stage may use the time that is left.
STAGES = {"decode": 0.74, "prefill": 0.85, "cache write": 0.88, "block copy": 0.90}
