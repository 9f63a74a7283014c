"""What becomes of a preempted sequence's blocks: copied to the host pool, or dropped and computed again.

Swapping costs copies, out now and in again later; recomputing costs a prefill of the same tokens. Which is less depends
on block size, length and machine (PagedAttention, section 7.3; CHECKLIST I), so `auto` asks for every victim.
"""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """`mode` is one of MODES. The rest is what the executor measured; 0 where it did not."""

    mode: str = "recompute"
    block_bytes: int = 0
    out_bytes_per_s: int = 0
    in_bytes_per_s: int = 0
    prefill_tokens_per_s: int = 0

    def swaps(self, blocks_out: int, blocks_in: int, tokens: int) -> bool:
        """Whether a victim is swapped of which `blocks_out` blocks have to be copied now and `blocks_in` later, or else
        `tokens` tokens computed again.
        """
        if self.mode != "auto":
            return self.mode == "swap"
        if not (self.out_bytes_per_s and self.in_bytes_per_s and self.prefill_tokens_per_s):
            return False
        copying_s = self.block_bytes * (blocks_out / self.out_bytes_per_s + blocks_in / self.in_bytes_per_s)
        return copying_s < tokens / self.prefill_tokens_per_s
