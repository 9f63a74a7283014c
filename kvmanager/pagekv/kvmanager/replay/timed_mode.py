"""Timed mode: requests arrive as the trace says, the real scheduler batches them, and a simulated executor takes time.

As in the engine loop, up to `pipeline_depth` steps are planned ahead, so a step can contain only requests that had
arrived when it was planned.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgpack
import numpy as np

from pagekv.kvmanager.engine.step_times import StepTimes
from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.observe.recording.step_recorder import plan_columns
from pagekv.kvmanager.replay.options import ReplayOptions
from pagekv.kvmanager.replay.report import Row, Spread, StepTiming
from pagekv.kvmanager.replay.simulated_executor import BegunStep, SimulatedExecutor
from pagekv.kvmanager.replay.trace import TraceRecord, distinct_prefixes, prompt_tokens
from pagekv.kvmanager.request.command import GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, live_request


def enough_blocks(records: Sequence[TraceRecord], options: ReplayOptions) -> int:
    """Number of blocks with which a pool never evicts and the scheduler never preempts."""
    size = options.block_size
    total = -(-options.tokens_per_id // size) * distinct_prefixes(records)
    for record in records:
        # Besides shared blocks: the output, the partial block in which it begins, and one for a full hit, whose last
        # token is computed again.
        own = record.output_length + (0 if record.hash_ids else record.input_length)
        total += -(-own // size) + 2
    return total


def replay_timed(
    records: Sequence[TraceRecord],
    options: ReplayOptions,
    policy: str,
    num_blocks: int | None,
    progress: Callable[[int], None],
) -> Row:
    """One row of timed mode. `num_blocks` None: unbounded. `progress` gets the number of arrived requests."""
    begun = time.perf_counter()
    unbounded = num_blocks is None
    num_blocks = num_blocks or enough_blocks(records, options)
    # Records with equal times stay in the order of the file.
    in_order = sorted(records, key=lambda record: record.arrival_s)
    fitting = [record for record in in_order if fits(record, num_blocks, options.block_size)]
    replay = TimedReplay(fitting, options, policy, num_blocks)
    replay.run(progress)
    executor, counters = replay.executor, replay.scheduler.counters
    timing = StepTiming(
        ttft_s=Spread.of(executor.ttft_s),
        inter_token_s=Spread.of(executor.inter_token_s),
        utilisation=1 - replay.unused_slot_s / replay.slot_s if replay.slot_s else None,
        preemptions=counters.preemptions,
        refused=len(records) - len(fitting),
        output_tokens=executor.generated_tokens,
        steps=executor.steps,
        simulated_s=replay.now_s - (replay.arrivals[0] if fitting else 0.0),
        peak_waiting=replay.peak_waiting,
        peak_blocks=replay.peak_blocks,
        decisions=replay.decisions.hexdigest(),
    )
    return Row(
        policy=policy,
        blocks=num_blocks,
        unbounded=unbounded,
        requests=len(records),
        hit_blocks=int((replay.cached_tokens // options.block_size).sum()),
        prompt_blocks=sum(record.input_length // options.block_size for record in fitting),
        hit_tokens=counters.cached_tokens,
        prompt_tokens=sum(record.input_length for record in fitting),
        evictions=replay.scheduler.pool.evictions,
        timing=timing,
        wall_s=time.perf_counter() - begun,
    )


def fits(record: TraceRecord, num_blocks: int, block_size: int) -> bool:
    """Whether a request can ever run in `num_blocks` blocks. The last token's keys and values are never needed."""
    return -(-(record.input_length + record.output_length - 1) // block_size) <= num_blocks


class TimedReplay:
    """Runs requests, which all fit, through the scheduler in the order of their arrival. As in the engine loop, steps
    are bounded while tenants compete, and planned just in time: each one when the one before has ended.
    """

    def __init__(
        self,
        records: Sequence[TraceRecord],
        options: ReplayOptions,
        policy: str,
        num_blocks: int,
        tenants: Sequence[Tenant] = (),
    ) -> None:
        """`tenants`: the tenant of each record; empty: all have the same. Only records of one tenant share prefixes."""
        self.arrivals = array("d", [record.arrival_s / options.speed for record in records])
        self.executor = SimulatedExecutor(options.cost, options.block_size, self.arrivals)
        pool = BlockPool(num_blocks, options.block_size, options.order(policy, num_blocks))
        self.scheduler = Scheduler(pool, options.limits(policy), ())
        self.now_s = self.arrivals[0] if records else 0.0
        # Integrals over simulated time.
        self.slot_s = self.unused_slot_s = 0.0
        # By request: prompt tokens found in the cache at its first admission.
        self.cached_tokens = np.zeros(len(records), np.int64)
        # SHA-256 over every plan.
        self.decisions = hashlib.sha256()
        self.peak_waiting = self.peak_blocks = 0
        self._records = records
        self._options = options
        self._tenants = tenants or [NO_TENANT] * len(records)
        self._roots = {tenant.name: root_digest("replay", tenant.name, "") for tenant in self._tenants}
        self._arrived = 0
        self._times = StepTimes(options.max_batch_tokens)
        self._in_flight: deque[BegunStep] = deque()

    def run(self, progress: Callable[[int], None]) -> None:
        """Plans and commits steps until every request has all of its tokens."""
        while True:
            self._arrive()
            while len(self._in_flight) < (1 if self.scheduler.competing else self._options.pipeline_depth):
                if not self._plan():
                    break
            if self._in_flight:
                step = self._in_flight.popleft()
                self.now_s += step.seconds
                result = self.executor.finish(step, self.now_s)
                self.scheduler.commit(step.plan, result)
                if self.scheduler.competing:
                    self._times.learn(step.plan, result.execute_us)
                    self.scheduler.set_bound(self._times.bound())
            elif self._arrived < len(self._records):
                self.now_s = max(self.now_s, self.arrivals[self._arrived])
            else:
                break
            if self.executor.steps % 64 == 0:
                progress(self._arrived)
        expected = sum(record.output_length for record in self._records)
        if self.executor.generated_tokens != expected:
            raise InvariantError(f"{self.executor.generated_tokens} of {expected} tokens came, and no step is planned")

    def _arrive(self) -> None:
        while self._arrived < len(self._records) and self.arrivals[self._arrived] <= self.now_s:
            self.scheduler.add(self._request(self._arrived))
            self._arrived += 1
        self.peak_waiting = max(self.peak_waiting, len(self.scheduler.waiting))

    def _request(self, index: int) -> LiveRequest:
        record = self._records[index]
        prompt = prompt_tokens(record, index, self._options.tokens_per_id, record.input_length).tolist()
        tenant = self._tenants[index]
        command = GenerateCommand(f"r{index}", prompt, SamplingParams(max_tokens=record.output_length), tenant=tenant)
        # The stream is never read, because the simulated executor counts the generated tokens.
        return live_request(command, RequestStream(command.request_id, 1), index, self._roots[tenant.name], 0)

    def _plan(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.decisions.update(msgpack.packb(plan_columns(plan)))
        for admitted in plan.admitted:
            self.cached_tokens[admitted.sequence.request.arrival] = admitted.sequence.cached_tokens or 0
        step = self.executor.begin(plan)
        active = self.scheduler.pool.num_active
        self.peak_blocks = max(self.peak_blocks, active)
        self.slot_s += active * self._options.block_size * step.seconds
        self.unused_slot_s += step.unused_slots * step.seconds
        self._in_flight.append(step)
        return True
