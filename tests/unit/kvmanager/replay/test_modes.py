"""Replays judged by plain models: an LRU dictionary, a set of prefixes, an executor that counts by loops."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.replay.cache_mode import replay_cache
from pagekv.kvmanager.replay.cost_model import StepCost
from pagekv.kvmanager.replay.options import ReplayOptions
from pagekv.kvmanager.replay.report import Row, StepTiming
from pagekv.kvmanager.replay.simulated_executor import BegunStep, SimulatedExecutor
from pagekv.kvmanager.replay.synthetic_prompt import prompt_ids
from pagekv.kvmanager.replay.timed_mode import replay_timed
from pagekv.kvmanager.replay.trace import TraceRecord, read_trace
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, live_request
from pagekv.kvmanager.scheduling.step_plan import NewSeq, StepPlan

SAMPLE = read_trace(Path(__file__).resolve().parents[3] / "data" / "traces" / "mooncake_sample.jsonl")
OPTIONS = ReplayOptions(
    block_size=512,
    tokens_per_id=512,
    partial_blocks=True,
    protected_share=0.2,
    speed=1.0,
    max_batch_tokens=2048,
    max_running=64,
    watermark=0.01,
    pipeline_depth=2,
    cost=StepCost(),
)
# Small blocks, so that a few records of a few tokens exercise everything.
SMALL = replace(OPTIONS, block_size=4, tokens_per_id=4, max_batch_tokens=24, max_running=8, watermark=0.0)


def ignore(done: int) -> None:
    pass


def random_trace(seed: int, count: int = 60, longest: int = 10) -> list[TraceRecord]:
    """Conversations over few ids: prompts extend, repeat and cut earlier ones."""
    rng = random.Random(seed)
    records: list[TraceRecord] = []
    chains: list[tuple[int, ...]] = [()]
    fresh = 0
    for index in range(count):
        kept = rng.choice(chains[-8:])
        ids = list(kept[: rng.randint(0, len(kept))])
        while not ids or (len(ids) < longest and rng.random() < 0.6):
            ids.append(fresh)
            fresh += 1
        # How full the last block is depends on its id, as it does in traces, whose ids are hashes of content.
        length = 4 * len(ids) - ids[-1] % 4
        chains.append(tuple(ids))
        records.append(TraceRecord(index * rng.random() * 0.01, length, rng.randint(1, 12), tuple(ids)))
    return records


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


SMALLER = random_trace(seed=99)


@pytest.mark.parametrize("replay", [replay_cache, replay_timed])
def test_slru_keeps_a_prefix_in_use_from_a_scan(replay: Callable[..., Row]) -> None:
    """CHECKLIST G9, G10: the third request comes after more blocks than there are were read once."""
    prompts = [(0, 1, 10), (0, 1, 11), *(tuple(range(first, first + 10)) for first in (20, 30, 40)), (0, 1, 12)]
    records = [TraceRecord(float(index), 4 * len(ids), 1, ids) for index, ids in enumerate(prompts)]
    options = replace(SMALL, protected_share=0.8)
    assert replay(records, options, "lru", 20, ignore).hit_blocks == 2
    assert replay(records, options, "slru", 20, ignore).hit_blocks == 4
    assert replay(records, replace(options, protected_share=0.0), "slru", 20, ignore).hit_blocks == 2


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
            tokens = prompt_ids(record, index, 4)
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


class CountingExecutor:
    """Applies plans one sequence at a time: computed, known and slots by seq_id."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.slots: dict[int, int] = {}

    def run(self, plan: StepPlan, cost: StepCost) -> tuple[float, int]:
        """Seconds and unused slots of the step."""
        for seq_id in plan.finished:
            del self.computed[seq_id], self.known[seq_id], self.slots[seq_id]
        for new in plan.new:
            self.computed[new.seq_id], self.known[new.seq_id] = new.computed_tokens, len(new.token_ids)
            self.slots[new.seq_id] = len(new.block_ids) * self.block_size
        for seq_id in plan.append_seq_ids:
            self.slots[seq_id] += self.block_size
        listed = dict(zip(plan.scheduled_seq_ids, plan.scheduled_tokens, strict=True))
        prefill = decodes = kv_tokens = 0
        for seq_id in self.computed:
            count = listed.get(seq_id, 1)
            if self.computed[seq_id] == self.known[seq_id] and count:
                decodes += 1
                self.known[seq_id] += 1
            else:
                prefill += count
            self.computed[seq_id] += count
            kv_tokens += self.computed[seq_id] if count else 0
        assert prefill + decodes == plan.num_tokens
        unused = sum(self.slots[seq_id] - self.known[seq_id] for seq_id in self.computed)
        return cost.seconds(prefill, decodes, kv_tokens), unused


def request_of(record: TraceRecord, index: int) -> LiveRequest:
    command = GenerateCommand(
        f"r{index}", prompt_ids(record, index, 4), SamplingParams(max_tokens=record.output_length)
    )
    return live_request(command, RequestStream("", 1), index, root_digest("", "", ""), 0)


@pytest.mark.parametrize("blocks", [14, 40])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_executors_running_sums_equal_counting(blocks: int, depth: int) -> None:
    records = random_trace(seed=blocks + depth, count=40)
    pool = BlockPool(blocks, 4)
    scheduler = Scheduler(pool, SchedulerLimits(3, 8, 0.0, True), ())
    for index, record in enumerate(records):
        scheduler.add(request_of(record, index))
    executor = SimulatedExecutor(StepCost(), 4, array("d", [0.0] * len(records)))
    counting = CountingExecutor(4)
    in_flight: deque[BegunStep] = deque()
    while True:
        while len(in_flight) < depth and (plan := scheduler.schedule()) is not None:
            assert plan.num_tokens <= 3
            step = executor.begin(plan)
            seconds, unused = counting.run(plan, StepCost())
            assert step.seconds == pytest.approx(seconds)
            assert step.unused_slots == unused
            in_flight.append(step)
        if not in_flight:
            break
        step = in_flight.popleft()
        scheduler.commit(step.plan, executor.finish(step, 0.0))
    assert executor.generated_tokens == sum(record.output_length for record in records)
    assert (scheduler.counters.preemptions > 0) == (blocks == 14)


def step_plan(sampling: list[int], finished: list[int] | None = None, **columns: Any) -> StepPlan:
    return StepPlan(finished or [], sampling=np.array(sampling), **columns)


def test_sequences_that_sit_a_step_out_read_nothing() -> None:
    executor = SimulatedExecutor(StepCost(), 4, array("d", [0.0, 0.0]))
    counting = CountingExecutor(4)
    first, second = (
        request_of(TraceRecord(0.0, length, 9, (index, index)), index).sequences[0]
        for index, length in enumerate((6, 5))
    )
    new = [
        NewSeq(first, 1, first.token_ids, array("i", [0, 1]), 0),
        NewSeq(second, 2, second.token_ids, array("i", [2, 3]), 4),
    ]
    plans = [
        # Prefills of 6 tokens and of 1, a decode beside one that sits out, two decodes, one that leaves.
        step_plan(new=new, scheduled_seq_ids=[1], scheduled_tokens=[6], sampling=[1, 2], num_tokens=7),
        step_plan(scheduled_seq_ids=[2], scheduled_tokens=[0], sampling=[1], num_tokens=1),
        step_plan(sampling=[1, 2], num_tokens=2),
        step_plan(finished=[1], sampling=[2], num_tokens=1),
    ]
    for plan in plans:
        step = executor.begin(plan)
        seconds, unused = counting.run(plan, StepCost())
        assert step.seconds == pytest.approx(seconds)
        assert step.unused_slots == unused
