"""What is measured: shapes, and the bytes and operations that each needs at least. Imports neither torch nor CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEAD_SIZE = 128
BLOCK_SIZE = 16
ELEMENT_BYTES = 2  # bfloat16

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Heads:
    """How many query heads share a KV head."""

    name: str
    num_heads: int
    num_kv_heads: int


MHA = Heads("MHA", 32, 32)
GQA4 = Heads("GQA 4", 32, 8)
GQA8 = Heads("GQA 8", 64, 8)
MQA = Heads("MQA", 32, 1)
RATIOS = (MHA, GQA4, GQA8, MQA)


@dataclass(frozen=True)
class DecodeCase:
    """One new token of each of `batch` sequences with `context` visible tokens."""

    heads: Heads
    batch: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer: what memory has to deliver."""
        return self.batch * self.context * 2 * self.heads.num_kv_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        """Keys and values read, queries read, outputs written; each once."""
        return self.kv_bytes + 2 * self.batch * self.heads.num_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def name(self) -> str:
        return f"{self.heads.name}, {self.batch} x {count(self.context)}"


@dataclass(frozen=True)
class PrefillCase:
    """`new` prompt tokens of each of `batch` sequences, behind `cached` tokens that are in the pool already."""

    heads: Heads
    batch: int
    new: int
    cached: int = 0

    @property
    def context(self) -> int:
        return self.cached + self.new

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * 2 * self.heads.num_kv_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def flops(self) -> int:
        """Two products of two operations for every visible pair of query and key, and element of a head."""
        visible = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * HEAD_SIZE * self.heads.num_heads * self.batch * visible

    @property
    def name(self) -> str:
        behind = f" behind {count(self.cached)}" if self.cached else ""
        return f"{self.heads.name}, {self.batch} x {count(self.new)}{behind}"


@dataclass(frozen=True)
class WriteCase:
    """Keys and values of `tokens` new tokens of one layer, RoPE included."""

    heads: Heads
    tokens: int

    @property
    def bytes(self) -> int:
        """Keys and values read and written; queries rotated in place."""
        per_token = 2 * 2 * self.heads.num_kv_heads + 2 * self.heads.num_heads
        return self.tokens * per_token * HEAD_SIZE * ELEMENT_BYTES

    @property
    def name(self) -> str:
        return f"{self.heads.name}, {count(self.tokens)} tokens"


@dataclass(frozen=True)
class SwapCase:
    """Blocks of a 32-layer model with 8 KV heads (Llama 3 8B) moved between device and host pool."""

    block_size: int
    num_blocks: int
    scattered: bool
    """True: no two of them adjoin. False: one run, which coalesces into a single copy."""

    LAYERS = 32
    KV_HEADS = 8

    @property
    def block_bytes(self) -> int:
        return self.LAYERS * 2 * self.block_size * self.KV_HEADS * HEAD_SIZE * ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def name(self) -> str:
        return f"block size {self.block_size}, {self.num_blocks} blocks {'scattered' if self.scattered else 'in a run'}"


def count(number: int) -> str:
    """65536 -> 64k."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def decode_cases() -> Iterator[DecodeCase]:
    """Batch 1 to 256, context 256 to 64k, every head ratio."""
    for heads in RATIOS:
        for batch in (1, 8, 64, 256):
            for context in (256, 1024, 4096, 16384, 65536):
                yield DecodeCase(heads, batch, context)


def prefill_cases() -> Iterator[PrefillCase]:
    """Prompts of 512 to 16k tokens, then chunks behind a cached prefix."""
    for heads in (MHA, GQA4):
        for new in (512, 1024, 2048, 4096, 8192, 16384):
            yield PrefillCase(heads, max(1, 8192 // new), new)
    for cached in (4096, 16384, 65536):
        for new in (512, 2048):
            yield PrefillCase(GQA4, 1, new, cached)


def write_cases() -> Iterator[WriteCase]:
    for tokens in (1, 64, 256, 2048, 8192):
        yield WriteCase(GQA4, tokens)


def swap_cases(total: int = 512 * MIB) -> Iterator[SwapCase]:
    """As many blocks of each size as make up `total` bytes, at most 2048."""
    for block_size in (1, 16, 64, 256):
        for scattered in (True, False):
            blocks = min(2048, total // SwapCase(block_size, 1, False).block_bytes)
            yield SwapCase(block_size, blocks, scattered)


# --- what the figures are held against


@dataclass(frozen=True)
class Floor:
    """A figure that must be reached on an H200."""

    name: str
    at_least: float
    unit: str


FLOORS = {
    "decode": Floor("decode from 64 x 1k up, share of copy bandwidth", 0.88, "x"),
    "flashinfer": Floor("decode from 64 x 1k up, against FlashInfer", 1.0, "x"),
    "paged": Floor("decode from 64 x 1k up, scattered blocks against blocks in order", 0.97, "x"),
    "prefill": Floor("prefill of 4k, against torch SDPA", 0.65, "x"),
    "swap": Floor("swap from block size 16 up, against a pinned memcpy", 0.90, "x"),
}


def counts_for_decode_floor(case: DecodeCase) -> bool:
    """From 64 sequences of 1k tokens up."""
    return case.batch >= 64 and case.context >= 1024
