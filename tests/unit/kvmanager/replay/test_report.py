"""The figures of a replay, as people read them."""

from __future__ import annotations

from array import array

from pagekv.kvmanager.replay.report import Row, Spread, as_table, duration

ROW = Row("lru", 1000, True, 2, 3, 4, 48, 60, 5, None, 0.25)


def test_durations() -> None:
    shown = [duration(seconds) for seconds in (None, 0.00123, 0.0456, 0.789, 12.34, 345.6)]
    assert shown == ["-", "1.2 ms", "45.6 ms", "789 ms", "12.3 s", "346 s"]


def test_a_spread_is_percentiles_mean_and_maximum() -> None:
    assert Spread.of(array("d")) is None
    assert Spread.of(array("d", [1.0, 2.0, 3.0])) == Spread(2.0, 2.8, 2.98, 2.0, 3.0)


def test_a_table_has_a_line_for_each_row_and_rates_of_it() -> None:
    assert (ROW.block_hit_rate, ROW.token_hit_rate) == (0.75, 0.8)
    head, line = as_table([ROW]).splitlines()
    assert head.split() == ["policy", "blocks", "hits/blocks", "hits/tokens", "evictions", "wall"]
    assert line.split() == ["lru", "1,000", "(all)", "75.00%", "80.00%", "5", "0.2", "s"]
