"""The bound of a step while tenants compete, so that a newcomer waits a bounded time for the step that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

# At least one part of so many is left for prompts.
MIN_PARTS = 16


@dataclass(frozen=True, slots=True)
class StepBound:
    """Costs, in tokens of prompts: how much a step may have beside what every step costs."""

    tokens: int
    # Of one decode.
    decode: float
    # Instead of `tokens` while there are visitors (`Visitors`), in a step without a newcomer's prompt.
    visited: int

    def beside_visitors(self) -> StepBound:
        """The bound while there are visitors."""
        return replace(self, tokens=self.visited)

    def num_decodes(self, parts: int) -> int:
        """Decodes that one of so many parts of the step is enough for; one at least."""
        return max(1, int(self.tokens / parts / self.decode)) if self.decode else max(1, self.tokens)

    def left_beside(self, decodes: int) -> int:
        """Tokens left for prompts beside so many decodes."""
        return max(1, self.tokens // MIN_PARTS, int(self.tokens - decodes * self.decode))
