"""The arithmetic of a deployment: the memory of a KV cache, and the number of requests that fit into a memory size.

Only the bytes of keys and values, in exact integers. Weights, activations, graphs and allocator headroom need further
memory, so a capacity is planned with these figures and then measured by the executor. Formulas: Kwon et al., "Efficient
Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023), sections 3 and 4; where a figure
here differs from a published one, the docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from pagekv.client.planning.kv_geometry import DTYPE_BYTES, KvGeometry


@dataclass(frozen=True, slots=True)
class Shard:
    """The KV heads that one tensor-parallel rank stores. `sharding` says how heads are distributed, in words."""

    kv_heads: int
    sharding: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """`batch` sequences of `context` tokens, in whole blocks. Bytes of one rank."""

    context: int
    batch: int
    blocks: int
    bytes_per_rank: int


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Blocks and requests that `memory` bytes of KV memory on each rank hold."""

    memory: int
    num_blocks: int
    # Slots in all blocks.
    tokens: int
    overhead: float
    # Bytes of a sequence of full context with the overhead, on one rank, rounded up.
    request_bytes: int
    full_context_requests: int
    # Bytes of the block tables of that many requests, in addition to the KV memory.
    table_bytes: int


@dataclass(frozen=True, slots=True)
class Tail:
    """The last block of a sequence: `unused` of its slots stay empty."""

    tokens: int
    blocks: int
    slots: int
    unused: int


@dataclass(frozen=True, slots=True)
class Waste:
    """The memory of sequences, in bytes of the whole model: with the whole context reserved for each, and in blocks.

    `reserved_unused` and `paged_unused` are the unused shares of that memory, from 0 to 1.
    """

    tails: list[Tail]
    live_bytes: int
    reserved_bytes: int
    reserved_unused: float
    paged_bytes: int
    paged_unused: float


@dataclass(frozen=True, slots=True)
class PrefixSaving:
    """Requests with a common prefix. Only full blocks are shared: in the block where the prefix ends, each request
    continues with its own tokens. `saved` is the share of blocks, from 0 to 1, that sharing saves.
    """

    requests: int
    prefix_tokens: int
    full_blocks: int
    # Tokens of the prefix in its last, partial block.
    tail_tokens: int
    blocks_unshared: int
    blocks_shared: int
    saved: float
    # The same if the partial block could be shared too, which the often quoted 99.0 % assumes.
    saved_if_tail_were_shared: float


# Size of an entry of a block table, on the wire, in the manager and on the device.
TABLE_ENTRY_BYTES = 4


def bytes_per_token(geometry: KvGeometry, kv_heads: int | None = None) -> int:
    """2 (key and value) x layers x KV heads x head size x bytes of an element. `kv_heads` replaces the geometry's KV
    heads if given.

    LLaMA-13B in float16 gives 800 KiB, as in the PagedAttention paper (section 3), not the often quoted 1.5 MB.
    """
    heads = geometry.kv_heads if kv_heads is None else kv_heads
    return 2 * geometry.layers * heads * geometry.head_size * DTYPE_BYTES[geometry.dtype]


def bytes_per_block(geometry: KvGeometry, block_size: int, kv_heads: int | None = None) -> int:
    return block_size * bytes_per_token(geometry, kv_heads)


def blocks_for(tokens: int, block_size: int) -> int:
    """ceil(tokens / block size)."""
    return -(-tokens // block_size)


def tail_of(tokens: int, block_size: int) -> Tail:
    """The waste of one sequence: fewer than `block_size` slots, all of them in its last block."""
    blocks = blocks_for(tokens, block_size)
    slots = blocks * block_size
    return Tail(tokens, blocks, slots, slots - tokens)


def shard_kv_heads(kv_heads: int, tp: int) -> Shard:
    """KV heads on each of `tp` ranks: heads are replicated up to the least common multiple of both numbers and then
    distributed, so a rank has kv_heads / gcd(kv_heads, tp). That is kv_heads / tp if tp divides kv_heads (8 over 2: 4
    each), one if kv_heads divides tp (1 over 4), and all of them if the two have no common divisor (8 over 3). A
    running group does the same (`executor/model/tensor_parallel.py`).
    """
    each = kv_heads // math.gcd(kv_heads, tp)
    if kv_heads % tp == 0:
        return Shard(each, "whole" if tp == 1 else "sharded")
    copies = each * tp // kv_heads
    return Shard(each, "replicated on every rank" if each == kv_heads else f"each head on {copies} ranks")


def footprint(geometry: KvGeometry, block_size: int, tp: int, context: int, batch: int) -> Footprint:
    """batch x ceil(context / block size) blocks."""
    blocks = batch * blocks_for(context, block_size)
    rank_heads = shard_kv_heads(geometry.kv_heads, tp).kv_heads
    return Footprint(context, batch, blocks, blocks * bytes_per_block(geometry, block_size, rank_heads))


def capacity(geometry: KvGeometry, block_size: int, tp: int, memory: int, overhead: float) -> KvBudget:
    """Blocks and full-context requests in `memory` bytes of KV memory per rank.

    Blocks: floor(memory / bytes per block). Requests: floor(memory / ((1 + overhead) x bytes of ceil(context / block
    size) blocks)); the overhead covers the unused slots in the last blocks of sequences and the blocks that admission
    leaves free. 0.04 is the highest waste that the PagedAttention paper measured.
    """
    rank_heads = shard_kv_heads(geometry.kv_heads, tp).kv_heads
    block = bytes_per_block(geometry, block_size, rank_heads)
    # Fractions, because 1.04 has no exact binary form, and rounding must not change the number of requests.
    request = blocks_for(geometry.context, block_size) * block * (1 + Fraction(str(overhead)))
    num_blocks = memory // block
    return KvBudget(
        memory=memory,
        num_blocks=num_blocks,
        tokens=num_blocks * block_size,
        overhead=overhead,
        request_bytes=-(-request.numerator // request.denominator),
        full_context_requests=int(memory / request),
        table_bytes=table_bytes(geometry, block_size, int(memory / request)),
    )


def table_bytes(geometry: KvGeometry, block_size: int, requests: int) -> int:
    """`TABLE_ENTRY_BYTES` for each block of this number of full-context requests, including shared blocks."""
    return requests * blocks_for(geometry.context, block_size) * TABLE_ENTRY_BYTES


def sharing_requests(geometry: KvGeometry, block_size: int, fits: KvBudget, prefix_tokens: int) -> int:
    """Full-context requests in the blocks of `fits` when all begin with the same tokens, fewer than the context.

    The full blocks of the prefix are held once; each request has its own further blocks, with the overhead, as in
    `capacity`: floor((blocks - shared) / ((1 + overhead) x (blocks of the context - shared))).
    """
    shared = prefix_tokens // block_size
    own = (blocks_for(geometry.context, block_size) - shared) * (1 + Fraction(str(fits.overhead)))
    return max(0, int((fits.num_blocks - shared) / own))


def waste(geometry: KvGeometry, block_size: int, lengths: Sequence[int]) -> Waste:
    """Sequences of `lengths` tokens (each from 1 to the context): reserved for the whole context, against paged."""
    token = bytes_per_token(geometry)
    tails = [tail_of(length, block_size) for length in lengths]
    live = sum(lengths) * token
    reserved = len(lengths) * geometry.context * token
    paged = sum(tail.slots for tail in tails) * token
    return Waste(tails, live, reserved, 1 - live / reserved, paged, 1 - live / paged)


def prefix_saving(requests: int, prefix_tokens: int, block_size: int) -> PrefixSaving:
    """Blocks for the prefix without sharing: requests x ceil(prefix / block size). With sharing: floor(prefix / block
    size) full blocks for all requests and, if the prefix ends inside a block, one block for each request.

    100 requests x 1000 tokens in blocks of 16: 62 + 100 = 162 of 6300 blocks, 97.4 % saved. The often quoted 99.0 %
    counts 63 shared blocks, but one of them holds only 8 tokens of the prefix and is written by every request.
    """
    full, tail = divmod(prefix_tokens, block_size)
    in_blocks = blocks_for(prefix_tokens, block_size)
    unshared = requests * in_blocks
    shared = full + (requests if tail else 0)
    return PrefixSaving(
        requests=requests,
        prefix_tokens=prefix_tokens,
        full_blocks=full,
        tail_tokens=tail,
        blocks_unshared=unshared,
        blocks_shared=shared,
        saved=1 - shared / unshared,
        saved_if_tail_were_shared=1 - in_blocks / unshared,
    )
