"""The simulated executor, judged by one that counts sequence by sequence."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import pytest
from support.engine.replays import random_trace

from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.replay.options import StepCost
from pagekv.kvmanager.replay.simulated_executor import BegunStep, SimulatedExecutor
from pagekv.kvmanager.replay.trace import TraceRecord, prompt_tokens
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, live_request
from pagekv.kvmanager.scheduling.step_plan import NewSeq, StepPlan


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
    prompt = prompt_tokens(record, index, 4, record.input_length).tolist()
    command = GenerateCommand(f"r{index}", prompt, SamplingParams(max_tokens=record.output_length))
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
