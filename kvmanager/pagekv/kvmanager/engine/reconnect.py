"""How long the manager waits before it tries again to drive the executor."""

from __future__ import annotations

# Seconds: doubled from the first to the last.
RECONNECT_FIRST_S, RECONNECT_LAST_S = 0.05, 2.0
# Asking an executor that does not answer, or that another manager drives, costs next to nothing, and clients wait.
UNREACHABLE_S = 0.25


class Reconnect:
    """Pauses grow while nothing works: an executor may fail the first step of every epoch, and recomputing is work."""

    def __init__(self) -> None:
        self._pause_s = RECONNECT_FIRST_S

    def pause_s(self, *, attached: bool, steps: int) -> float:
        """After an attempt that got so far: it attached or not, and `steps` were answered."""
        if steps:
            self._pause_s = RECONNECT_FIRST_S
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 2, RECONNECT_LAST_S)
        return pause_s if attached else min(pause_s, UNREACHABLE_S)
