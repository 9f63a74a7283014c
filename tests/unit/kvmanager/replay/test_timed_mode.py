"""Timed mode, judged by a set of prefixes and by times worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.engine.replays import SMALL, SMALLER, ignore

from pagekv.kvmanager.replay.options import ReplayOptions, StepCost
from pagekv.kvmanager.replay.report import Row, StepTiming
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceRecord, prompt_tokens, read_trace


def timing(row: Row) -> StepTiming:
    assert row.timing is not None
    return row.timing


@pytest.mark.parametrize(("options", "blocks"), [(SMALL, 14), (SMALL, 60), (replace(SMALL, pipeline_depth=1), 14)])
def test_the_same_trace_twice_gives_the_same_decisions(options: ReplayOptions, blocks: int) -> None:
    rows = [replay_timed(SMALLER, options, "lru", blocks, ignore) for _ in range(2)]
    assert replace(rows[0], wall_s=0.0) == replace(rows[1], wall_s=0.0)
    other = replay_timed(SMALLER, options, "lru", blocks + 1, ignore)
    assert timing(other).decisions != timing(rows[0]).decisions


def test_an_unbounded_pool_hits_every_full_block_seen_before() -> None:
    for options in (SMALL, replace(SMALL, block_size=2), replace(SMALL, block_size=8)):
        row = replay_timed(SMALLER, options, "lru", None, ignore)
        seen: set[tuple[int, ...]] = set()
        expected = 0
        for index, record in enumerate(sorted(SMALLER, key=lambda record: record.arrival_s)):
            tokens = prompt_tokens(record, index, 4, record.input_length).tolist()
            size = options.block_size
            prefixes = [tuple(tokens[: end + size]) for end in range(0, len(tokens) - size + 1, size)]
            # At least one token is computed.
            expected += sum(1 for prefix in prefixes if prefix in seen and len(prefix) < len(tokens))
            seen.update(prefixes)
        assert row.hit_blocks == expected > 0
        assert (row.evictions, timing(row).preemptions, timing(row).refused) == (0, 0, 0)


def test_a_tight_pool_preempts_and_still_finishes() -> None:
    row = replay_timed(SMALLER, SMALL, "lru", 14, ignore)
    assert timing(row).preemptions > 0
    assert row.evictions > 0
    assert timing(row).output_tokens == sum(record.output_length for record in SMALLER)
    assert timing(row).peak_blocks <= 14


def test_a_request_that_can_never_fit_is_refused_and_counted() -> None:
    records = [
        TraceRecord(0.0, 8, 4, (0, 1)),
        TraceRecord(0.0, 400, 4, tuple(range(100))),
        TraceRecord(1.0, 8, 2, (0, 2)),
    ]
    row = replay_timed(records, SMALL, "lru", 10, ignore)
    assert timing(row).refused == 1
    assert timing(row).output_tokens == 6
    assert (row.requests, row.prompt_tokens) == (3, 16)
    nothing = replay_timed(records[1:2], SMALL, "lru", 10, ignore)
    assert (timing(nothing).refused, timing(nothing).ttft_s, timing(nothing).utilisation) == (1, None, None)


def test_simulated_times_by_hand() -> None:
    cost = StepCost(step_ms=1.0, prefill_us=1000.0, decode_us=500.0, kv_read_ns=10_000.0)
    options = replace(SMALL, cost=cost, max_batch_tokens=8, speed=2.0)
    records = [TraceRecord(10.0, 10, 3, (0, 1, 2)), TraceRecord(30.0, 2, 1, (9,))]
    row = timing(replay_timed(records, options, "lru", 20, ignore))
    # Chunks of 8 and 2 tokens that read 8 and 10; the other request arrives, at twice the speed, 10 s later.
    first = (1 + 8 + 0.08) + (1 + 2 + 0.10)
    second = 1 + 2 + 0.02
    assert row.ttft_s is not None
    assert row.inter_token_s is not None
    assert (row.ttft_s.max, row.ttft_s.mean) == pytest.approx((first / 1e3, (first + second) / 2e3))
    # Decodes that read 11 and 12.
    assert row.inter_token_s.max == pytest.approx((1 + 0.5 + 0.12) / 1e3)
    assert row.inter_token_s.mean == pytest.approx((1 + 0.5 + 0.115) / 1e3)
    assert row.simulated_s == pytest.approx(10 + second / 1e3)


TRACES = Path(__file__).parents[3] / "data" / "traces"


@pytest.mark.parametrize("name", ["azure_sample.csv", "azure_code_sample.csv"])
def test_recorded_lengths_fill_96_percent_of_blocks_of_16_and_a_third_of_a_reservation(name: str) -> None:
    """Over simulated time, in the memory of four contexts of 8,192 tokens. A reservation takes a context at once, as
    paging with blocks of that length does. A paged step decodes for almost twice as many requests or more.
    """
    records = read_trace(TRACES / name)
    common = ReplayOptions(block_size=16, tokens_per_id=512, partial_blocks=False, speed=8.0)
    paged = timing(replay_timed(records, common, "slru", 4 * 8192 // 16, ignore))
    reserved = timing(replay_timed(records, replace(common, block_size=8192), "slru", 4, ignore))
    assert paged.refused == reserved.refused == 0
    assert paged.output_tokens == reserved.output_tokens == sum(record.output_length for record in records)
    assert paged.utilisation is not None
    assert reserved.utilisation is not None
    assert paged.utilisation >= 0.96
    assert reserved.utilisation <= 0.382
    assert paged.output_tokens / paged.steps > 1.9 * reserved.output_tokens / reserved.steps
    assert paged.simulated_s < reserved.simulated_s


def test_the_first_token_costs_what_is_not_cached() -> None:
    """4,096 tokens that all have in common and 128 of each: the first computes 4,224, the others 128, and in proportion
    where less is cached. Decoding costs the same.
    """
    cost = StepCost(step_ms=0.0, prefill_us=1.0, decode_us=1.0, kv_read_ns=0.0)
    options = ReplayOptions(
        block_size=16, tokens_per_id=128, partial_blocks=False, speed=1.0, max_batch_tokens=8192, cost=cost
    )
    common = tuple(range(32))
    for cached in (32, 16, 0):
        second = (*common[:cached], *range(100, 133 - cached))
        records = [TraceRecord(0.0, 4224, 3, (*common, 99)), TraceRecord(100.0, 4224, 3, second)]
        row = timing(replay_timed(records, options, "slru", 1024, ignore))
        assert row.ttft_s is not None
        assert row.inter_token_s is not None
        first, then = 4224e-6, (4224 - 128 * cached) * 1e-6
        assert (row.ttft_s.max, row.ttft_s.mean) == pytest.approx((first, (first + then) / 2))
        assert row.inter_token_s.max == pytest.approx(1e-6)


def test_chunks_bound_the_gap_between_tokens_while_a_long_prompt_is_computed() -> None:
    """16 streams, and five prompts of 8,192 tokens that come while they run: computed whole, each stalls every stream
    for its whole time; in chunks of 512 no gap is longer than a step.
    """
    cost = StepCost(step_ms=5.0, prefill_us=40.0, decode_us=0.0, kv_read_ns=0.0)
    common = ReplayOptions(block_size=16, tokens_per_id=512, partial_blocks=False, speed=1.0, cost=cost)
    streams = [TraceRecord(0.0, 16, 400, ()) for _ in range(16)]
    records = [*streams, *(TraceRecord(0.1 + 0.3 * number, 8192, 1, ()) for number in range(5))]
    gaps = {}
    for budget in (512 + 16, 16384):
        row = timing(replay_timed(records, replace(common, max_batch_tokens=budget), "slru", 8192, ignore))
        assert row.inter_token_s is not None
        gaps[budget] = row.inter_token_s
    step_s = 5e-3 + 512 * 40e-6
    assert gaps[528].p99 == pytest.approx(step_s)
    assert gaps[528].max <= step_s * 1.001
    assert gaps[16384].p99 > 8192 * 40e-6 > 10 * gaps[528].p99
