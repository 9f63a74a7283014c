"""Points of the page's charts: rates between two looks at counters that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pagekv.v1.operator_service_pb2 import GetStatsResponse

# Seconds that the charts go back.
KEPT_S = 120.0
# Seconds that a rate covers, at least. Prompts come one at a time, so what is of requests needs more of them.
RATE_S = 1.0
HIT_RATE_S = 10.0

Point = dict[str, Any]
# Number and sum of durations so far, in seconds, by the name of a value of points.
Durations = Mapping[str, tuple[int, float]]


class _Look(NamedTuple):
    at: float
    stats: GetStatsResponse
    durations: Durations


class PoolRates:
    """Points with a number `n` from 1 on and a time `at`, seconds of the clock that `add` is given. A value without
    meaning at that moment is None. `apart`: nobody looked between this point and the one before.
    """

    def __init__(self) -> None:
        self.total = 0
        self._kept: deque[Point] = deque()
        self._looks: deque[_Look] = deque()

    def since(self, number: int) -> list[Point]:
        """Kept points with numbers above this one."""
        return [point for point in self._kept if point["n"] > number]

    def pause(self) -> None:
        """Drops the counters seen so far, as nobody will look for a while: the next rates begin with the next look."""
        self._looks.clear()

    def add(self, now: float, stats: GetStatsResponse, durations: Durations) -> None:
        """Adds a point for the counters at `now`, seconds of a clock that never goes back. Of `durations` the point has
        the averages in milliseconds.

        While sequences run, a value that nothing new came for is the one before: steps may take longer than a look.
        """
        self._looks.append(_Look(now, stats, durations))
        while self._looks[0].at < now - HIT_RATE_S:
            self._looks.popleft()
        _, oldest, durations_before = self._looks[0]
        recent_at, recent, _ = self._recent(now)
        prompt = stats.prompt_tokens_total - oldest.prompt_tokens_total
        cached = stats.cached_tokens_total - oldest.cached_tokens_total
        steps = stats.steps_total - recent.steps_total
        # Steps that take long were counted a while ago.
        seconds = self._counted_first(len(self._looks) - 1).at - recent_at
        self.total += 1
        while self._kept and self._kept[0]["at"] < now - KEPT_S:
            self._kept.popleft()
        values: dict[str, float | None] = {
            "hit_rate": _share(cached, prompt),
            # Average of the steps in between.
            "step_ms": _share((stats.executor_busy_us_total - recent.executor_busy_us_total) / 1000, steps),
            "tokens_per_s": _share(stats.generated_tokens_total - recent.generated_tokens_total, seconds),
            "computed_per_s": _share(stats.computed_tokens_total - recent.computed_tokens_total, seconds),
        }
        for name, (number, total) in durations.items():
            number_before, total_before = durations_before[name]
            values[name] = _share(1000 * (total - total_before), number - number_before)
        runs = bool(stats.executor_attached and stats.running_sequences)
        if runs and not steps:
            values |= {"tokens_per_s": None, "computed_per_s": None}
        if runs and self._kept and len(self._looks) > 1:
            before = self._kept[-1]
            values = {name: before[name] if value is None else value for name, value in values.items()}
        self._kept.append(
            {
                "n": self.total,
                "at": round(now, 3),
                "apart": len(self._looks) == 1,
                "usage": round(stats.kv_usage, 4),
                **values,
            }
        )

    def _recent(self, now: float) -> _Look:
        """The look that a rate begins with, RATE_S ago or before."""
        ago = [index for index, look in enumerate(self._looks) if look.at <= now - RATE_S]
        return self._counted_first(ago[-1] if ago else 0)

    def _counted_first(self, index: int) -> _Look:
        """The first of the looks up to this one, while sequences ran, that had counted the same steps: about when the
        last of these steps ended. A rate over parts of long steps would swing.
        """
        found = self._looks[index]
        for before in reversed([*self._looks][:index]):
            if before.stats.steps_total != found.stats.steps_total or not before.stats.running_sequences:
                break
            found = before
        return found


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None
