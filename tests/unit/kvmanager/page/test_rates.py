"""Points of the charts: rates between looks, gaps, and how long points are kept."""

from __future__ import annotations

from pagekv.kvmanager.page.rates import KEPT_S, PoolRates
from pagekv.v1 import operator_service_pb2 as pb

STATS = pb.GetStatsResponse(
    prompt_tokens_total=100,
    cached_tokens_total=0,
    steps_total=10,
    generated_tokens_total=50,
    computed_tokens_total=150,
    executor_busy_us_total=20_000,
    kv_usage=0.25,
)


def test_rates_are_of_the_time_between_two_looks() -> None:
    rates = PoolRates()
    rates.add(1.0, STATS)
    rates.add(
        3.0,
        pb.GetStatsResponse(
            prompt_tokens_total=140,
            cached_tokens_total=10,
            steps_total=14,
            generated_tokens_total=70,
            computed_tokens_total=190,
            executor_busy_us_total=30_000,
            kv_usage=0.25,
        ),
    )
    first, second = rates.since(0)
    assert (first["apart"], first["hit_rate"], first["step_ms"], first["tokens_per_s"]) == (True, None, None, None)
    assert (second["n"], second["at"], second["apart"], second["usage"]) == (2, 3.0, False, 0.25)
    assert (second["hit_rate"], second["step_ms"]) == (0.25, 2.5)
    assert (second["tokens_per_s"], second["computed_per_s"]) == (10.0, 20.0)
    assert rates.since(1) == [second]


def test_a_pause_sets_points_apart_and_old_points_go() -> None:
    rates = PoolRates()
    for now in (1, 2, 3):
        rates.add(now, STATS)
    rates.pause()
    rates.add(54, STATS)
    assert [(point["at"], point["apart"]) for point in rates.since(0)] == [
        (1, True),
        (2, False),
        (3, False),
        (54, True),
    ]
    rates.add(2.5 + KEPT_S, STATS)
    assert [point["at"] for point in rates.since(0)] == [3, 54, 2.5 + KEPT_S]
