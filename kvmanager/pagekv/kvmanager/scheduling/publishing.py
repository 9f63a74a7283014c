"""Publishing: a block that is full of known tokens, and planned to be computed, enters the prefix table. From then on
other sequences may hit it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagekv.kvmanager.kvcache.block_hash import chain_digests, sha256
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens
from pagekv.kvmanager.kvcache.prefix_trie import Node
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.sequence import Seq


class Publisher:
    """Publishes the blocks of sequences. Owned by `BlockTables`, which shares its pools."""

    def __init__(self, pool: BlockPool, host: HostPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._host = host
        self._limits = limits
        self._block_size = pool.block_size
        # Published blocks that the step being planned computes. Others can hit these blocks, because a layer writes all
        # keys and values of a step before it attends, but not copy them, because copies run first.
        self._being_computed: list[Blocks] = []
        # Whether each block is one of them, [num_blocks].
        self._marked = np.zeros(pool.num_blocks, np.bool_)

    def next_step(self) -> None:
        """Begins a step: blocks published from now on belong to it."""
        for blocks in self._being_computed:
            self._marked[blocks] = False
        self._being_computed.clear()

    def _compute(self, blocks: Blocks) -> None:
        """Notes that the step being planned computes these blocks."""
        self._being_computed.append(blocks)
        self._marked[blocks] = True

    def is_being_computed(self, block: int) -> bool:
        """Whether the step being planned computes this block."""
        return bool(self._marked[block])

    def publish(self, sequence: Seq, *, computed_now: bool = False) -> None:
        """Offers every block full of known and planned tokens to the prefix table; `computed_now`: of this step."""
        size = self._block_size
        first, full = sequence.num_published, min(sequence.num_tokens, sequence.num_computed) // size
        if full <= first:
            return
        sequence.num_published = full
        if not (self._limits.prefix_cache and sequence.publishes):
            return
        self.extend_digests(sequence)
        digests, blocks = sequence.digests, sequence.blocks()[first:full]
        chunks = sequence.chunks(size, first, full)
        # Blocks before the first medium are identified by their tokens, like any text.
        text = min(max(first, sequence.first_media // size), full)
        for begin, end, media in ((first, text, False), (text, full, True)):
            if begin < end and sequence.publishes:
                parent = digests[begin - 1] if begin else sequence.request.root
                # If the block before has left the table, as void or by a reset, no block can follow it.
                if begin and not self._pool.table.is_entered(sequence.block_table[begin - 1]):
                    sequence.publishes = False
                    break
                here = slice(begin - first, end - first)
                sequence.publishes = self._pool.publish_chain(
                    blocks[here],
                    digests[begin:end],
                    parent,
                    chunks[here],
                    first=begin == 0,
                    media=media,
                    names=sequence.request.names,
                )
                if self._host.num_blocks:
                    digests[begin:end] = self._pool.table.digest_objects(blocks[here], digests[begin:end])
        if computed_now and self._limits.partial_hits:
            self._compute(blocks)

    def publish_last(
        self,
        sequences: Sequence[Seq],
        tokens: BlockTokens,
        token_bytes: Sequence[bytes],
        *,
        computed_now: bool,
    ) -> None:
        """Publishes the last block of each of these sequences, which is full. `tokens`, [n, block_size], and
        `token_bytes` are the tokens of these blocks. Each decoding sequence needs this once in block_size steps.
        `computed_now` as in `publish`.
        """
        size = self._block_size
        prefix_cache = self._limits.prefix_cache
        ready: list[int] = []
        offered: list[int] = []
        before: list[Node] = []
        digests: list[bytes] = []
        parents: list[bytes] = []
        for position, (sequence, raw) in enumerate(zip(sequences, token_bytes, strict=True)):
            table = sequence.block_table
            index = len(table) - 1
            full = index * size + size
            if prefix_cache and sequence.publishes and sequence.num_published == index:
                # `publish` handles media and the names of a first block; later blocks inherit their parents' names.
                if full > sequence.first_media or (index == 0 and sequence.request.names):
                    self.publish(sequence, computed_now=computed_now)
                else:
                    known = sequence.digests
                    # With one token per block, the next block may be known already and have a digest.
                    del known[index:]
                    parent = known[-1] if index else sequence.request.root
                    digest = sha256(parent + raw).digest()
                    known.append(digest)
                    ready.append(position)
                    offered.append(table[index])
                    before.append(table[index - 1] if index else parent)
                    digests.append(digest)
                    parents.append(parent)
            sequence.num_published = index + 1
        if ready:
            if computed_now and self._limits.partial_hits:
                self._compute(np.array(offered, np.int32))
            for place in self._pool.publish_one_each(offered, digests, before, parents, tokens[ready]):
                # Not the simple case: `publish` handles every case.
                sequence = sequences[ready[place]]
                sequence.num_published -= 1
                self.publish(sequence)

    def extend_digests(self, sequence: Seq) -> None:
        """Extends `digests` to all full blocks of the known tokens."""
        size = self._block_size
        full, done = sequence.num_tokens // size, len(sequence.digests)
        if done < full:
            parent = sequence.digests[-1] if done else sequence.request.root
            new = sequence.token_ids[done * size : full * size].tobytes()
            sequence.digests += chain_digests(parent, new, size, sequence.request.command.identity.media, done)
