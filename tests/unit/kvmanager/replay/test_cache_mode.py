"""Cache mode, judged by an LRU dictionary over hash ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.engine.replays import OPTIONS, SAMPLE, SMALL, SMALLER, ignore, random_trace

from pagekv.kvmanager.replay.cache_mode import replay_cache
from pagekv.kvmanager.replay.report import Row
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceRecord


def lru_hits(records: Sequence[TraceRecord], capacity: int, size: int, partial: bool) -> int:
    """Leading hits of an LRU dictionary over hash ids, one block each, deepest block oldest."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for record in records:
        blocks = len(record.hash_ids) if partial else record.input_length // size
        chain = [record.hash_ids[: end + 1] for end in range(blocks)]
        run = next((i for i, prefix in enumerate(chain) if prefix not in cache), len(chain))
        hits += run
        for prefix in reversed(chain):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("capacity", [20, 100, 250, 10_000])
def test_cache_mode_is_an_lru_dictionary_on_the_sample(capacity: int, partial: bool) -> None:
    row = replay_cache(SAMPLE, replace(OPTIONS, partial_blocks=partial), "lru", capacity, ignore)
    assert row.hit_blocks == lru_hits(SAMPLE, capacity, 512, partial) > 0
    assert row.prompt_blocks == sum(
        len(record.hash_ids) if partial else record.input_length // 512 for record in SAMPLE
    )


@pytest.mark.parametrize("seed", range(20))
def test_cache_mode_is_an_lru_dictionary_on_random_traces(seed: int) -> None:
    records = random_trace(seed)
    partial = seed % 2 == 0
    # From smaller than one prompt to larger than all of them.
    for capacity in (1, 2, 3, 5, 8, 13, 21, 34, 55, 1000):
        row = replay_cache(records, replace(SMALL, partial_blocks=partial), "lru", capacity, ignore)
        assert row.hit_blocks == lru_hits(records, capacity, 4, partial)


def test_cache_mode_unbounded() -> None:
    row = replay_cache(SAMPLE, OPTIONS, "lru", None, ignore)
    assert row.unbounded
    assert row.blocks == len({hash_id for record in SAMPLE for hash_id in record.hash_ids})
    assert row.evictions == 0
    assert row.prompt_blocks - row.hit_blocks == row.blocks
    # A prompt that is hit whole counts its own tokens, not those of full blocks.
    assert row.hit_tokens <= row.prompt_tokens == sum(record.input_length for record in SAMPLE)


def test_cache_mode_in_smaller_blocks_hits_the_same_spans() -> None:
    whole = replay_cache(SAMPLE, replace(OPTIONS, partial_blocks=False), "lru", None, ignore)
    fine = replay_cache(SAMPLE, replace(OPTIONS, block_size=16, partial_blocks=False), "lru", None, ignore)
    assert 0 <= fine.hit_tokens - whole.hit_tokens < 512 * len(SAMPLE)
    assert fine.hit_blocks == fine.hit_tokens // 16


def test_without_a_prefix_cache_nothing_hits() -> None:
    cached, timed = replay_cache(SAMPLE, OPTIONS, "none", 500, ignore), replay_timed(SMALLER, SMALL, "none", 99, ignore)
    assert (cached.hit_blocks, timed.hit_blocks) == (0, 0)
    assert cached.prompt_blocks > 0
    assert timed.prompt_blocks > 0


@pytest.mark.parametrize("replay", [replay_cache, replay_timed])
def test_slru_keeps_a_prefix_in_use_from_a_scan(replay: Callable[..., Row]) -> None:
    """A hot prefix must survive a scan: the third request for the prefix comes after the pool was read through once."""
    prompts = [(0, 1, 10), (0, 1, 11), *(tuple(range(first, first + 10)) for first in (20, 30, 40)), (0, 1, 12)]
    records = [TraceRecord(float(index), 4 * len(ids), 1, ids) for index, ids in enumerate(prompts)]
    options = replace(SMALL, protected_share=0.8)
    assert replay(records, options, "lru", 20, ignore).hit_blocks == 2
    assert replay(records, options, "slru", 20, ignore).hit_blocks == 4
    assert replay(records, replace(options, protected_share=0.0), "slru", 20, ignore).hit_blocks == 2
