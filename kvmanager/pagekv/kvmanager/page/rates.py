"""The points of the page's charts: rates between two looks at cumulative counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pagekv.v1.operator_service_pb2 import GetStatsResponse

# Seconds that the charts cover.
KEPT_S = 120.0
# Least seconds that a rate covers. Prompts come one at a time, so rates of requests cover a longer time.
RATE_S = 1.0
HIT_RATE_S = 10.0

Point = dict[str, Any]
# By the name of a point's value: the number of durations so far and their sum in seconds.
Durations = Mapping[str, tuple[int, float]]


class _Look(NamedTuple):
    at: float
    stats: GetStatsResponse
    durations: Durations


class PoolRates:
    """Makes points with a number `n` from 1 on and a time `at`, in seconds of the clock of `add`. A value that has no
    meaning at that moment is None. `apart`: the looks paused between this point and the one before.
    """

    def __init__(self) -> None:
        self.total = 0
        self._kept: deque[Point] = deque()
        self._looks: deque[_Look] = deque()

    def since(self, number: int) -> list[Point]:
        """Kept points with a number above this one."""
        return [point for point in self._kept if point["n"] > number]

    def pause(self) -> None:
        """Drops the counters seen so far; the next rates begin with the next look."""
        self._looks.clear()

    def add(self, now: float, stats: GetStatsResponse, durations: Durations) -> None:
        """Adds a point for the counters at `now`, in seconds of a clock that never goes back. The point has the
        averages of `durations` in milliseconds.

        While sequences run, a value without new data keeps its former value, because steps may take longer than the
        time between looks.
        """
        self._looks.append(_Look(now, stats, durations))
        while self._looks[0].at < now - HIT_RATE_S:
            self._looks.popleft()
        _, oldest, durations_before = self._looks[0]
        recent_at, recent, _ = self._recent(now)
        prompt = stats.prompt_tokens_total - oldest.prompt_tokens_total
        cached = stats.cached_tokens_total - oldest.cached_tokens_total
        steps = stats.steps_total - recent.steps_total
        # Long steps: the present counters may have been reached some looks ago.
        seconds = self._counted_first(len(self._looks) - 1).at - recent_at
        self.total += 1
        while self._kept and self._kept[0]["at"] < now - KEPT_S:
            self._kept.popleft()
        values: dict[str, float | None] = {
            "hit_rate": _share(cached, prompt),
            # Average of the steps between the two looks.
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
        """The look with which a rate begins: RATE_S ago or earlier."""
        ago = [index for index, look in enumerate(self._looks) if look.at <= now - RATE_S]
        return self._counted_first(ago[-1] if ago else 0)

    def _counted_first(self, index: int) -> _Look:
        """The first look, with sequences running since then, that had counted the same steps as this look: about the
        end of the latest of these steps. Rates over parts of long steps would oscillate.
        """
        found = self._looks[index]
        for before in reversed([*self._looks][:index]):
            if before.stats.steps_total != found.stats.steps_total or not before.stats.running_sequences:
                break
            found = before
        return found


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None
