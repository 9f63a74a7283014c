"""The bound of a step while tenants compete, so that a newcomer waits only a bounded time for the running step."""

from __future__ import annotations

from dataclasses import dataclass, replace

# At least 1 / MIN_PARTS of the bound is left for prompts.
MIN_PARTS = 16


@dataclass(frozen=True, slots=True)
class StepBound:
    """How much a step may compute besides the cost that every step has. The unit is the cost of one prompt token."""

    tokens: int
    # Cost of one decode.
    decode: float
    # The bound instead of `tokens` while there are visitors (`Visitors`), in a step without a newcomer's prompt.
    visited: int

    def beside_visitors(self) -> StepBound:
        """The bound while there are visitors."""
        return replace(self, tokens=self.visited)

    def num_decodes(self, parts: int) -> int:
        """Decodes that fit into 1 / `parts` of the step; at least one."""
        return max(1, int(self.tokens / parts / self.decode)) if self.decode else max(1, self.tokens)

    def left_beside(self, decodes: int) -> int:
        """Tokens left for prompts besides so many decodes."""
        return max(1, self.tokens // MIN_PARTS, int(self.tokens - decodes * self.decode))
