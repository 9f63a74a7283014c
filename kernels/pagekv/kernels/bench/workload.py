"""The cases that are measured: shapes, and the least bytes and operations of each. Imports neither torch nor CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

HEAD_SIZE = 128
BLOCK_SIZE = 16
ELEMENT_BYTES = 2  # bfloat16

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
GQA4 = Heads("GQA 4", 32, 8)
GQA8 = Heads("GQA 8", 64, 8)
MQA = Heads("MQA", 32, 1)
RATIOS = (MHA, GQA4, GQA8, MQA)


@dataclass(frozen=True)
class DecodeCase:
    """One new token of each of `batch` sequences with `context` visible tokens (with `ragged`: on average)."""

    heads: Heads
    batch: int
    context: int
    block_size: int = BLOCK_SIZE
    kv_dtype: str = "bfloat16"
    ragged: bool = False
    """Contexts from 1 to twice the average, as in a real load."""
    pool_layers: int = 0
    """Layers of the pool, block-major as in the executor: blocks of one layer are that many slabs apart. 0: as few as
    keep the cache cold."""

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer."""
        element_bytes = 1 if self.kv_dtype == "float8_e4m3fn" else ELEMENT_BYTES
        return self.batch * self.context * 2 * self.heads.num_kv_heads * HEAD_SIZE * element_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of the arena that the case needs at least."""
        return max(self.pool_layers, MIN_LAYERS) * self.kv_bytes * (2 if self.ragged else 1)

    @property
    def bytes(self) -> int:
        """Keys and values read, queries read, outputs written; each once."""
        return self.kv_bytes + 2 * self.batch * self.heads.num_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def name(self) -> str:
        """Label of the case in the report."""
        words = [f"{self.heads.name}, {self.batch} x {count(self.context)}"]
        words += ["fp8"] if self.kv_dtype != "bfloat16" else []
        words += ["ragged"] if self.ragged else []
        words += [f"block size {self.block_size}"] if self.block_size != BLOCK_SIZE else []
        words += [f"{self.pool_layers} layers"] if self.pool_layers else []
        return ", ".join(words)

    @property
    def plain(self) -> bool:
        """Equal contexts in bf16 and blocks of the usual size: the cases that peers are measured on too."""
        return self == DecodeCase(self.heads, self.batch, self.context)


@dataclass(frozen=True)
class PrefillCase:
    """`new` prompt tokens of each of `batch` sequences, behind `cached` tokens in the pool."""

    heads: Heads
    batch: int
    new: int
    cached: int = 0

    @property
    def context(self) -> int:
        """Visible tokens of each sequence at the end of the step."""
        return self.cached + self.new

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one layer."""
        return self.batch * self.context * 2 * self.heads.num_kv_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def pool_bytes(self) -> int:
        """Bytes of the arena that the case needs at least."""
        return MIN_LAYERS * self.kv_bytes

    @property
    def flops(self) -> int:
        """Two products of two operations for every visible pair of query and key, and element of a head."""
        visible = self.new * self.cached + self.new * (self.new + 1) // 2
        return 4 * HEAD_SIZE * self.heads.num_heads * self.batch * visible

    @property
    def name(self) -> str:
        """Label of the case in the report."""
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
        """Label of the case in the report."""
        return f"{self.heads.name}, {count(self.tokens)} tokens"


@dataclass(frozen=True)
class BlockCopyCase:
    """Copy-on-write of `blocks` blocks of 32 layers in one launch."""

    heads: Heads
    blocks: int

    LAYERS = 32

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers."""
        return self.LAYERS * 2 * BLOCK_SIZE * self.heads.num_kv_heads * HEAD_SIZE * ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        """Read and written."""
        return 2 * self.blocks * self.block_bytes

    @property
    def name(self) -> str:
        """Label of the case in the report."""
        return f"copy of {self.blocks} blocks of {self.block_bytes / MIB:g} MiB"


@dataclass(frozen=True)
class SwapCase:
    """Blocks of a 32-layer model with 8 KV heads (Llama 3 8B) moved between device and host pool."""

    block_size: int
    num_blocks: int
    scattered: bool
    """True: no two blocks adjoin. False: one run, which is a single copy."""

    LAYERS = 32
    KV_HEADS = 8

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block, all layers."""
        return self.LAYERS * 2 * self.block_size * self.KV_HEADS * HEAD_SIZE * ELEMENT_BYTES

    @property
    def bytes(self) -> int:
        """Bytes moved in one direction."""
        return self.num_blocks * self.block_bytes

    @property
    def name(self) -> str:
        """Label of the case in the report."""
        return f"block size {self.block_size}, {self.num_blocks} blocks {'scattered' if self.scattered else 'in a run'}"


def count(number: int) -> str:
    """65536 -> 64k."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def decode_cases() -> Iterator[DecodeCase]:
    """Batch 1 to 256, context 256 to 64k, every head ratio, cases with a floor first; then cases of real pools and
    loads: the executor's layout, fp8, other block sizes, unequal contexts.
    """
    shapes = [
        DecodeCase(heads, batch, context)
        for heads in RATIOS
        for batch in (1, 8, 64, 256)
        for context in (256, 1024, 4096, 16384, 65536)
    ]
    yield from (case for case in shapes if decode_floor(case))
    yield from LAYOUT_CASES
    yield from (DecodeCase(GQA4, 64, 4096, block_size=block_size) for block_size in (1, 64, 256))
    yield from (DecodeCase(GQA4, batch, 4096, ragged=True) for batch in (64, 256))
    for batch, context in ((64, 1024), (256, 1024), (64, 4096), (64, 16384)):
        yield DecodeCase(GQA4, batch, context, kv_dtype="float8_e4m3fn")
    yield from (case for case in shapes if not decode_floor(case))


# The executor's layout of a pool: 32 layers, block-major; the second pool has 64 GiB.
LAYOUT_CASES = (DecodeCase(GQA4, 64, 1024, pool_layers=32), DecodeCase(GQA4, 64, 8192, pool_layers=32))
# The same work in a compact pool, the denominator of the layout's cost.
COMPACT_CASES = {case: DecodeCase(case.heads, case.batch, case.context) for case in LAYOUT_CASES}


def prefill_cases() -> Iterator[PrefillCase]:
    """Prompts of 512 to 16k tokens, then chunks behind a cached prefix."""
    for heads in (MHA, GQA4):
        for new in (512, 1024, 2048, 4096, 8192, 16384):
            yield PrefillCase(heads, max(1, 8192 // new), new)
    for cached in (4096, 16384, 65536):
        for new in (512, 2048):
            yield PrefillCase(GQA4, 1, new, cached)


def write_cases() -> Iterator[WriteCase]:
    """Decodes of 1, 64 and 256 sequences, then prompts of 2k and 8k tokens."""
    for tokens in (1, 64, 256, 2048, 8192):
        yield WriteCase(GQA4, tokens)


def block_copy_cases() -> Iterator[BlockCopyCase]:
    """A fork of a few sequences, and of many."""
    for blocks in (16, 128):
        yield BlockCopyCase(GQA4, blocks)


def swap_cases(total: int = 512 * MIB) -> Iterator[SwapCase]:
    """Blocks of each size that make up `total` bytes, at most 2048."""
    for block_size in (1, 16, 64, 256):
        for scattered in (True, False):
            blocks = min(2048, total // SwapCase(block_size, 1, False).block_bytes)
            yield SwapCase(block_size, blocks, scattered)


# --- floors


@dataclass(frozen=True)
class Floor:
    """A figure to be reached on an H200."""

    name: str
    at_least: float


FLOORS = {
    "decode": Floor("decode of 64 and more, 1 GiB and more, groups of 1 to 8, share of copy bandwidth", 0.88),
    "decode small": Floor("decode of 64 and more, 256 MiB to 1 GiB, groups of 1 to 8, share of copy", 0.82),
    "decode mqa": Floor("decode of 64 and more, 256 MiB and more, groups of 32, share of copy", 0.70),
    "paged": Floor("the same decodes, scattered blocks against no block table", 0.97),
    "layers": Floor("decode in the layout of 32 layers, against a compact pool", 0.95),
    "prefill": Floor("prefill of 4k, against torch's FlashAttention", 0.80),
    "swap": Floor("swap from block size 16 up, against a pinned memcpy", 0.90),
}
SMALL, LARGE = 256 * MIB, GIB
"""Bytes of a decode's keys and values. The fixed costs of a kernel are some 5 us: below 256 MiB (60 us of an H200's
memory) these decide, and no kernel reaches a floor; from 1 GiB on they no longer count."""


def decode_floor(case: DecodeCase) -> str | None:
    """Key of the floor that a case counts for."""
    if not case.plain or case.batch < 64 or case.kv_bytes < SMALL:
        return None
    if case.heads.num_heads // case.heads.num_kv_heads > 8:
        return "decode mqa"
    return "decode" if case.kv_bytes >= LARGE else "decode small"


def counts_for_paging(case: DecodeCase) -> bool:
    """Whether a case counts for the floor of paging: large batches bound by memory, beside which noise is small."""
    return case.plain and case.batch >= 64 and case.kv_bytes >= SMALL
