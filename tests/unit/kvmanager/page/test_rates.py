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
    rates.add(1.0, STATS, {})
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
        {},
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
        rates.add(now, STATS, {})
    rates.pause()
    rates.add(54, STATS, {})
    assert [(point["at"], point["apart"]) for point in rates.since(0)] == [
        (1, True),
        (2, False),
        (3, False),
        (54, True),
    ]
    rates.add(2.5 + KEPT_S, STATS, {})
    assert [point["at"] for point in rates.since(0)] == [3, 54, 2.5 + KEPT_S]


def at_work(steps: int, tokens: int) -> pb.GetStatsResponse:
    """Counters while 24 sequences run."""
    return pb.GetStatsResponse(
        executor_attached=True,
        running_sequences=24,
        steps_total=steps,
        generated_tokens_total=tokens,
        computed_tokens_total=tokens,
        executor_busy_us_total=3_000_000 * steps,
    )


def test_rates_keep_their_values_while_a_slow_step_runs() -> None:
    """Steps of 3 s and 24 tokens, looks twice a second: always 3 s a step and 8 tokens a second."""
    rates = PoolRates()
    for look in range(40):
        steps = look // 6
        rates.add(look / 2, at_work(steps, 24 * steps), {})
    points = rates.since(14)
    assert {point["step_ms"] for point in points} == {3000.0}
    assert {point["tokens_per_s"] for point in points} == {8.0}
    assert {point["computed_per_s"] for point in points} == {8.0}


def test_nothing_is_kept_once_nothing_runs() -> None:
    rates = PoolRates()
    for look in range(6):
        rates.add(look, at_work(look, 24 * look), {})
    done = at_work(5, 120)
    done.running_sequences = 0
    for look in range(6, 9):
        rates.add(look, done, {})
    last = rates.since(0)[-1]
    assert (last["step_ms"], last["tokens_per_s"]) == (None, 0.0)


def test_durations_are_averages_of_what_came_in_between() -> None:
    rates = PoolRates()
    idle = pb.GetStatsResponse()
    rates.add(0.0, idle, {"ttft_ms": (1, 0.5)})
    rates.add(1.0, idle, {"ttft_ms": (3, 1.1)})
    rates.add(2.0, idle, {"ttft_ms": (3, 1.1)})
    rates.add(20.0, idle, {"ttft_ms": (3, 1.1)})
    assert [point["ttft_ms"] for point in rates.since(0)] == [None, 300.0, 300.0, None]
