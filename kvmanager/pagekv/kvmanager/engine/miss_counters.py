"""Counts prompt blocks that hit the prefix cache at first admission, and why the first other block misses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagekv.kvmanager.kvcache.block_hash import block_digest, media_keys
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.scheduling.sequence import Seq


@dataclass(slots=True)
class MissCounters:
    """Cumulative since the manager started; names and meanings as in GetStatsResponse."""

    prompt_blocks_total: int = 0
    cached_blocks_total: int = 0
    misses_never_seen_total: int = 0
    misses_evicted_total: int = 0
    misses_cleared_total: int = 0
    misses_diverged_total: int = 0
    misses_partial_tail_total: int = 0

    def count(self, sequence: Seq, pool: BlockPool, log: TableLog, reads_cache: bool) -> None:
        """Counts a sequence that has just got its blocks for the first time, and has published none of its own yet.

        `reads_cache`: whether the prompt was looked up at all. Costs two dictionary look-ups, at most one more digest,
        and a look at the neighbours of a block that was never seen.
        """
        size, hits = pool.block_size, sequence.num_published
        self.prompt_blocks_total += -(-sequence.num_prompt // size)
        self.cached_blocks_total += min(hits, sequence.num_prompt // size)
        if reads_cache:
            self._count_miss(sequence, hits, pool, log)

    def _count_miss(self, sequence: Seq, hits: int, pool: BlockPool, log: TableLog) -> None:
        size, known = pool.block_size, len(sequence.token_ids)
        if hits == known // size:
            self.misses_partial_tail_total += bool(known % size)
            return
        digest = _digest(sequence, hits, size)
        if pool.table.lookup(digest) is not None:
            return  # the last block, cached but needed for one token that has to be computed all the same
        removed = log.removed_ago(digest)
        if removed is not None:
            self.misses_cleared_total += removed.cleared
            self.misses_evicted_total += not removed.cleared
            return
        parent = sequence.block_table[hits - 1] if hits else sequence.request.root
        tokens = np.array(sequence.token_ids[hits * size : (hits + 1) * size], np.uint32)
        media = media_keys(sequence.request.command.identity.media, hits * size, (hits + 1) * size)
        shared = 0 if media else pool.table.longest_run(parent, tokens)[1]
        self.misses_diverged_total += bool(shared)
        self.misses_never_seen_total += not shared


def _digest(sequence: Seq, index: int, size: int) -> bytes:
    """Digest of the full block `index` of a sequence; the digests of the blocks before it are known."""
    if index < len(sequence.digests):
        return sequence.digests[index]
    parent = sequence.digests[index - 1] if index else sequence.request.root
    tokens = sequence.token_ids[index * size : (index + 1) * size].tobytes()
    keys = media_keys(sequence.request.command.identity.media, index * size, (index + 1) * size)
    return block_digest(parent, tokens, keys)
