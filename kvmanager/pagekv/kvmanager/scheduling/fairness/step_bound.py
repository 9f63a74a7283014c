"""The bound of a step while tenants compete, so that a newcomer waits a bounded time for the step that runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

# At least one part of so many is left for prompts.
MIN_PARTS = 16


@dataclass(frozen=True, slots=True)
class StepBound:
    """The cost of a step at most, beside what every step costs; that of a decode; and that of a step at most while
    there are visitors (`Visitors`), without a newcomer's prompt. All in tokens of prompts.
    """

    tokens: int
    decode: float
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
