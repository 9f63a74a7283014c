"""Drives a real Scheduler against the FakeExecutor, with steps in flight like the engine loop has."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

from support.engine.fake_executor import FakeExecutor, expected_output
from support.engine.integrity import check_scheduler

from pagekv.common.message_sizes import MAX_RECEIVE_BYTES
from pagekv.kvmanager.engine.answer_check import AnswerCheck
from pagekv.kvmanager.engine.outputs import deliver
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, root_digest
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.pins import Pins
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.request.tenant import NO_TENANT, Tenant
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.scheduler import Scheduler
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus, live_request
from pagekv.kvmanager.scheduling.step_plan import CopyKind, StepPlan
from pagekv.kvmanager.scheduling.swapping import SwapPolicy

VOCAB = 97


class Driver:
    """A manager without gRPC: submit, step, drain. Collects what each sequence was sent."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_tokens: int = 64,
        max_running: int = 16,
        watermark: float = 0.0,
        prefix_cache: bool = True,
        depth: int = 2,
        eos: tuple[int, ...] = (),
        vocab: int = VOCAB,
        partial_hits: bool = False,
        fork_sharing: bool = True,
        priority_aging: int = 0,
        protected_share: float | None = None,
        host_blocks: int = 0,
        preemption: str = "recompute",
        write_back: bool = False,
        preemption_limit: int = 3,
        max_step_bytes: int = MAX_RECEIVE_BYTES,
    ) -> None:
        """`protected_share`: evicts by segmented LRU with this share, else by LRU."""
        self.block_size = block_size
        self.protected_share = protected_share
        self.host_blocks = host_blocks
        self._new_pool(num_blocks)
        policy = SwapPolicy(preemption, 1, 1, 1, 1)
        limits = SchedulerLimits(
            max_batch_tokens,
            max_running,
            watermark,
            prefix_cache,
            partial_hits,
            fork_sharing,
            policy,
            write_back,
            preemption_limit,
            max_step_bytes,
        )
        self.priority_aging = priority_aging
        self.eos = eos
        self.scheduler = Scheduler(self.pool, limits, eos, host=self.host)
        self.vocab = vocab
        self.executor = self._new_executor()
        self._answers = AnswerCheck(vocab)
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.requests: list[LiveRequest] = []
        self.plans: list[StepPlan] = []

    def _new_pool(self, num_blocks: int) -> None:
        share = self.protected_share
        order = EvictionOrder(num_blocks) if share is None else EvictionOrder(num_blocks, "slru", share)
        self.pool = BlockPool(num_blocks, self.block_size, order)
        self.pins = Pins(self.pool, max_share=1.0)
        self.host = HostPool(self.host_blocks, self.block_size)

    def _new_executor(self) -> Any:
        """An executor for the plans, with empty pools."""
        return FakeExecutor(self.pool.num_blocks, self.block_size, self.vocab, self.host_blocks)

    def _prepare(self, command: GenerateCommand, root: bytes) -> PreparedPrompt | None:
        """Called before a request is made."""
        return None

    def _send(self, plan: StepPlan) -> None:
        """Called with every plan when it has been made, before anything else happens."""

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        priority: int = 0,
        n: int = 1,
        identity: CacheIdentity | None = None,
        stop_token_ids: tuple[int, ...] = (),
        min_tokens: int = 0,
        resumed: int = 0,
        beam_width: int = 0,
        length_penalty: float = 1.0,
        tenant: Tenant = NO_TENANT,
        **sampling_fields: Any,
    ) -> LiveRequest:
        """`sampling_fields` are others of SamplingParams; greedy by default."""
        arrival = len(self.requests)
        identity = identity or CacheIdentity()
        fields: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "stop_token_ids": stop_token_ids,
            "min_tokens": min_tokens,
            "beam_width": beam_width,
            "length_penalty": length_penalty,
        }
        sampling = SamplingParams(**{**fields, **sampling_fields})
        command = GenerateCommand(f"r{arrival}", prompt, sampling, n, resumed, identity, priority, tenant=tenant)
        root = root_digest("model", identity.namespace, identity.adapter_id)
        stream, prepared = RequestStream(command.request_id, n), self._prepare(command, root)
        request = live_request(command, stream, arrival, root, self.priority_aging, prepared)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan | None:
        """Plans one more step if the pipeline has room."""
        if len(self.in_flight) >= self.depth:
            return None
        plan = self.scheduler.schedule()
        if plan is not None:
            self.in_flight.append(plan)
            self.plans.append(plan)
            self._send(plan)
        return plan

    def complete(self) -> bool:
        """Runs and commits the oldest step in flight."""
        if not self.in_flight:
            return False
        plan = self.in_flight.popleft()
        result = self.executor.run(plan)
        result = self._answers.check(plan, result)
        deliver(self.scheduler.commit(plan, result), result)
        return True

    def step(self) -> bool:
        """Fills the pipeline, then completes one step; False when there was nothing to do."""
        while self.plan() is not None:
            pass
        progressed = self.complete()
        self.check()
        return progressed

    def drain(self, limit: int = 10_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"not drained after {limit} steps")

    def abort(self, request: LiveRequest) -> None:
        for sequence in request.sequences:
            self.scheduler.finish(sequence)

    def lose_executor(self) -> None:
        """A killed executor: steps in flight never answer, the pools are empty."""
        self._new_pool(self.pool.num_blocks)
        self.scheduler.lose_executor(self.pool, self.scheduler.limits, self.eos, self.host)
        self.in_flight.clear()
        self.executor = self._new_executor()
        self._answers = AnswerCheck(self.vocab)

    def check(self) -> None:
        live = (s for request in self.requests for s in request.sequences)
        check_scheduler(self.scheduler, live, self.pins)


def small_driver(seed: int, chance: random.Random, kind: type[Driver] = Driver) -> Driver:
    """A driver with a pool in which everything happens soon: hits, evictions, preemptions, swaps. The seed decides what
    is switched on, `chance` sizes.
    """
    return kind(
        num_blocks=chance.choice([24, 40]),
        block_size=2,
        max_batch_tokens=12,
        max_running=4,
        partial_hits=bool(seed % 2),
        protected_share=0.3,
        host_blocks=chance.choice([0, 16]),
        preemption="swap",
        write_back=bool(seed % 3),
    )


def copies(plan: StepPlan) -> list[tuple[int, int]]:
    """Copies on the device, (source, destination)."""
    return [(move.source, move.destination) for move in plan.copies if move.kind is CopyKind.COPY]


def moves(driver: Driver, kind: CopyKind) -> list[tuple[int, int]]:
    """All copies of a kind so far, (source, destination)."""
    return [(m.source, m.destination) for plan in driver.plans for m in plan.copies if m.kind is kind]


def cached(request: LiveRequest) -> int:
    """Tokens of the first sequence's prompt that were hits."""
    tokens = request.sequences[0].cached_tokens
    assert tokens is not None
    return tokens


def output(request: LiveRequest, index: int = 0) -> list[int]:
    """Tokens a sequence generated, resumed ones left out."""
    return request.sequences[index].token_ids[len(request.command.prompt_ids) :].tolist()


def streamed(request: LiveRequest, index: int = 0) -> tuple[list[int], FinishReason | None]:
    """Tokens and end that the request's reader would get for a sequence, all at once."""
    delta = request.stream._pending.get(index)
    return (delta.token_ids, delta.finish) if delta else ([], None)


def results(request: LiveRequest) -> list[list[int]]:
    """Tokens that the request's reader would get for each of its outputs."""
    return [delta.token_ids for _, delta in sorted(request.stream._pending.items())]


def finished(request: LiveRequest) -> bool:
    return all(sequence.state is SeqStatus.FINISHED for sequence in request.sequences)


def expect(prompt: Sequence[int], max_tokens: int, ends: tuple[int, ...] = ()) -> list[int]:
    """The output that a sequence of a driver with VOCAB tokens must have."""
    return expected_output(prompt, max_tokens, VOCAB, ends)


def right(request: LiveRequest) -> bool:
    """Whether each sequence, of a driver with VOCAB tokens and no end of text, generated what it must."""
    command = request.command
    wanted = expect(command.prompt_ids, command.sampling.max_tokens)
    return all(output(request, index) == wanted for index in range(command.n))


def all_running(driver: Driver, request: LiveRequest) -> None:
    """Until every sequence is at the executor, and then one step."""
    while any(s.state is not SeqStatus.RUNNING or s.seq_id < 0 for s in request.sequences):
        assert driver.step()
    driver.step()
