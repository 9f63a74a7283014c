"""Points of the page's charts: rates between two looks at counters that only grow."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagekv.v1.operator_service_pb2 import GetStatsResponse

# Seconds that the charts go back.
KEPT_S = 120.0
# Seconds that a rate covers. Prompts come one at a time, so the hit rate needs more of them.
RATE_S = 1.0
HIT_RATE_S = 10.0

Point = dict[str, Any]


class PoolRates:
    """Points with a number `n` from 1 on and a time `at`, seconds of the clock that `add` is given. A value without
    meaning at that moment is None. `apart`: nobody looked between this point and the one before.
    """

    def __init__(self) -> None:
        self.total = 0
        self._kept: deque[Point] = deque()
        self._looks: deque[tuple[float, GetStatsResponse]] = deque()

    def since(self, number: int) -> list[Point]:
        """Kept points with numbers above this one."""
        return [point for point in self._kept if point["n"] > number]

    def pause(self) -> None:
        """Drops the counters seen so far, as nobody will look for a while: the next rates begin with the next look."""
        self._looks.clear()

    def add(self, now: float, stats: GetStatsResponse) -> None:
        """Adds a point for the counters at `now`, seconds of a clock that never goes back."""
        self._looks.append((now, stats))
        while self._looks[0][0] < now - HIT_RATE_S:
            self._looks.popleft()
        first_at, oldest = self._looks[0]
        recent_at, recent = next(
            (look for look in reversed(self._looks) if look[0] <= now - RATE_S), (first_at, oldest)
        )
        prompt = stats.prompt_tokens_total - oldest.prompt_tokens_total
        cached = stats.cached_tokens_total - oldest.cached_tokens_total
        steps = stats.steps_total - recent.steps_total
        seconds = now - recent_at
        self.total += 1
        while self._kept and self._kept[0]["at"] < now - KEPT_S:
            self._kept.popleft()
        self._kept.append(
            {
                "n": self.total,
                "at": round(now, 3),
                "apart": len(self._looks) == 1,
                "hit_rate": _share(cached, prompt),
                "usage": round(stats.kv_usage, 4),
                # Average of the steps in between.
                "step_ms": _share((stats.executor_busy_us_total - recent.executor_busy_us_total) / 1000, steps),
                "tokens_per_s": _share(stats.generated_tokens_total - recent.generated_tokens_total, seconds),
                "computed_per_s": _share(stats.computed_tokens_total - recent.computed_tokens_total, seconds),
            }
        )


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None
