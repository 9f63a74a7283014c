"""Counts prompt blocks that hit the prefix cache at first admission, and why the first other block misses."""

from __future__ import annotations

from dataclasses import dataclass

from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.scheduling.step_plan import Admitted


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

    def count(self, admitted: Admitted, block_size: int, log: TableLog, reads_cache: bool) -> None:
        """Counts a sequence that got its blocks for the first time, in the step just planned. `reads_cache`: whether it
        was looked up at all.
        """
        sequence, hits = admitted.sequence, admitted.hit_blocks
        self.prompt_blocks_total += -(-sequence.num_prompt // block_size)
        self.cached_blocks_total += min(hits, sequence.num_prompt // block_size)
        if admitted.missed is None:
            full, partial = divmod(sequence.num_tokens, block_size)
            self.misses_partial_tail_total += bool(reads_cache and partial and hits == full)
            return
        removed = log.removed_ago(admitted.missed)
        if removed is not None:
            self.misses_cleared_total += removed.cleared
            self.misses_evicted_total += not removed.cleared
        else:
            self.misses_diverged_total += bool(admitted.shared_tokens)
            self.misses_never_seen_total += not admitted.shared_tokens
