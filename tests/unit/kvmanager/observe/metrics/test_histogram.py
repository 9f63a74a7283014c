"""Histograms: weighted values, with Prometheus' meaning of a bound."""

from __future__ import annotations

from pagekv.kvmanager.observe.metrics.histogram import Histogram


def test_a_value_counts_up_to_and_with_its_bound() -> None:
    histogram = Histogram([0.1, 1])
    for value in (0.05, 0.1, 0.2, 1, 1.5):
        histogram.observe(value)
    assert histogram.buckets() == [("0.1", 2), ("1.0", 4), ("+Inf", 5)]
    assert (histogram.count, round(histogram.total, 9)) == (5, 2.85)


def test_a_weight_counts_like_single_values() -> None:
    values = [0.05, 0.1, 0.1, 0.1, 7.0, 0.5]
    single, weighted = (Histogram([0.1, 0.5, 1]) for _ in range(2))
    for value in values:
        single.observe(value)
    for value in set(values):
        weighted.observe(value, values.count(value))
    assert weighted.buckets() == single.buckets()
    assert abs(weighted.total - single.total) < 1e-9
