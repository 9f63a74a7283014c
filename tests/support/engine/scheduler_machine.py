"""Random histories of the real scheduler and pool: whatever happens, every output is right and every block comes back.

Two machines share the rules: one is judged by the fake executor, which looks into every slot, the other by the
executor's own step check and oracle behind the messages of the wire.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engine.fake_executor import beam_search, expected_beams, expected_output
from support.engine.scheduler_driver import Driver, finished, output, results
from support.executor import wire_driver
from support.executor.wire_driver import GroupDriver, WireDriver

from pagekv.common.errors import LimitExceeded
from pagekv.kvmanager.engine.capacity import blocks_needed, total_tokens
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity, MediaSpan, chain_digests, token_bytes
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.tenant import Tenant
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.sequence import HOLDING, LiveRequest, SeqStatus

# Two media that differ where they look alike to the tokens, and one in the middle of a prompt.
MEDIA = [(), (), (MediaSpan(0, 3, "aa"),), (MediaSpan(0, 3, "bb"),), (MediaSpan(5, 2, "cc"),)]
# Weights of tenants, and their floors as shares of the pool.
SHARES: list[tuple[dict[int, float], dict[int, float]]] = [
    ({}, {}),
    ({}, {}),
    ({1: 3.0}, {}),
    ({}, {0: 0.3, 2: 0.5}),
    ({2: 0.1}, {0: 0.2, 1: 0.2, 2: 0.2}),
    ({}, {1: 1.0}),
]


class SchedulerMachine(RuleBasedStateMachine):
    """Judged by the fake executor, with two tokens only, so that prefixes collide all the time."""

    VOCAB = 2
    EOS: tuple[int, ...] = ()
    DRIVER = Driver

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(2, 24),
        running=st.integers(1, 6),
        watermark=st.sampled_from([0.0, 0.2]),
        depth=st.sampled_from([1, 2]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        partial_hits=st.booleans(),
        fork_sharing=st.sampled_from([True, True, True, False]),
        priority_aging=st.sampled_from([0, 2]),
        protected_share=st.sampled_from([None, 0.2, 0.5, 1.0]),
        host_blocks=st.sampled_from([0, 3, 8, 30]),
        preemption=st.sampled_from(["swap", "swap", "auto", "recompute"]),
        write_back=st.booleans(),
        preemption_limit=st.sampled_from([0, 1, 3]),
        shares=st.sampled_from(SHARES),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        running: int,
        shares: tuple[dict[int, float], dict[int, float]],
        **options: Any,
    ) -> None:
        self.driver = self.DRIVER(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=budget,
            max_running=running,
            vocab=self.VOCAB,
            eos=self.EOS,
            **options,
        )
        self.set_tenants(shares)
        # Sequences that were ended from outside, and all of a request: (request, index), (request, -1).
        self.stopped: set[tuple[int, int]] = set()
        # Pins, some of which may have ended with the memory they held.
        self.pinned: list[str] = []

    @rule(shares=st.sampled_from(SHARES))
    def set_tenants(self, shares: tuple[dict[int, float], dict[int, float]]) -> None:
        """While requests are live that were accepted under other floors."""
        weights, floors = shares
        num_blocks = self.driver.pool.num_blocks
        self.driver.scheduler.set_tenants(
            weights, {tenant: int(share * num_blocks) for tenant, share in floors.items()}
        )

    @rule(tokens=st.integers(1, 40), decode=st.sampled_from([0.0, 0.5, 1.0, 3.0]), visited=st.integers(1, 20))
    def set_bound(self, tokens: int, decode: float, visited: int) -> None:
        """Steps for which tenants compete are short from now on."""
        self.driver.scheduler.set_bound(StepBound(tokens, decode, visited))

    def sampling(self, data: st.DataObject, beam_width: int, max_tokens: int) -> dict[str, Any]:
        """Further fields of SamplingParams."""
        return {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 10),
        priority=st.integers(0, 1),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        namespace=st.sampled_from(["", "", "other"]),
        adapter=st.sampled_from(["", "", "other"]),
        media=st.sampled_from(MEDIA),
        read=st.sampled_from([True, True, False]),
        write=st.sampled_from([True, True, False]),
        stop=st.sampled_from([(), (), (1,)]),
        resumed=st.sampled_from([0, 0, 3]),
        beam_width=st.sampled_from([0, 0, 0, 1, 2, 3]),
        tenant=st.sampled_from([0, 0, 1, 2]),
        data=st.data(),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        n: int,
        namespace: str,
        adapter: str,
        media: tuple[MediaSpan, ...],
        read: bool,
        write: bool,
        stop: tuple[int, ...],
        resumed: int,
        beam_width: int,
        tenant: int,
        data: st.DataObject,
    ) -> None:
        resumed = min(resumed, max_tokens - 1, len(prompt) - 1) if n == 1 and not beam_width else 0
        beam_width = min(beam_width, self.driver.scheduler.limits.max_running)
        size = self.driver.block_size
        needed = -(-(len(prompt) - resumed + max_tokens - 1) // size) * max(1, beam_width)
        pool, pins = self.driver.pool, self.driver.pins
        most = pool.num_blocks - pins.num_blocks
        if pool.tenants is not None:
            most = pool.tenants.most_for(tenant, np.flatnonzero(pins.holders).astype(np.int32))
        if needed <= most:
            media = tuple(span for span in media if span.position + span.length <= len(prompt) - resumed)
            identity = CacheIdentity(namespace, adapter, media, read, write)
            n = min(n, beam_width) if beam_width else n
            more = self.sampling(data, beam_width, max_tokens) | {"tenant": Tenant(f"t{tenant}", tenant)}
            self.driver.submit(
                prompt, max_tokens, priority, n, identity, stop, resumed=resumed, beam_width=beam_width, **more
            )

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @rule()
    def complete(self) -> None:
        self.driver.complete()

    @rule(steps=st.integers(1, 5))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.driver.requests) - 1))
        self.stopped.add((at, -1))
        self.driver.abort(self.driver.requests[at])

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def stop_one_sequence(self, data: st.DataObject) -> None:
        """As for a stop string: the others of its request go on."""
        at = data.draw(st.integers(0, len(self.driver.requests) - 1))
        request = self.driver.requests[at]
        if request.search is None:
            index = data.draw(st.integers(0, len(request.sequences) - 1))
            self.stopped.add((at, index))
            self.driver.scheduler.finish(request.sequences[index])

    @rule()
    def preempt_all(self) -> None:
        self.driver.scheduler.preempt_all()

    @rule()
    def reset(self) -> None:
        """A forced reset of the prefix cache."""
        self.driver.scheduler.preempt_all()
        self.driver.pins.end_all()
        self.driver.scheduler.clear_prefix_cache()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Pins what is cached of a prompt, as far as every live request can still finish."""
        driver, size = self.driver, self.driver.block_size
        request = data.draw(st.sampled_from(driver.requests))
        command = request.command
        digests = chain_digests(request.root, token_bytes(command.prompt_ids), size, command.identity.media)
        chunks = np.array(command.prompt_ids, np.uint32)[: len(digests) * size].reshape(-1, size)
        live = [r.command for r in driver.requests if not finished(r)]
        tenants = driver.pool.tenants
        kept = [0 if tenants is None else tenants.floors_beside(command.tenant.number) for command in live]
        needs = [
            blocks_needed(total_tokens(c), size, c.sampling.beam_width) + k for c, k in zip(live, kept, strict=True)
        ]
        blocks = driver.pool.match(request.root, digests, chunks)
        if blocks:
            with contextlib.suppress(LimitExceeded):
                self.pinned.append(driver.pins.pin(blocks, 60, max(needs, default=0)).pin_id)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.driver.pins.unpin(self.pinned.pop())

    @rule()
    def reset_prefix_cache(self) -> None:
        """As with `force`: what drains keeps its blocks, which nobody finds any more."""
        self.driver.scheduler.preempt_all()
        self.driver.scheduler.clear_prefix_cache()

    @rule()
    def lose_executor(self) -> None:
        self.driver.lose_executor()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()
            for request in self.driver.requests:
                _check_sharing(self.driver, request)
                _check_digests(self.driver, request)
                _check_published(self.driver, request)
            limits = self.driver.scheduler.limits
            assert self.driver.executor.largest_step <= limits.max_batch_tokens

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.drain()
        assert self.driver.pool.num_active == self.driver.pins.num_blocks
        assert self.driver.host.num_held == 0
        assert not self.driver.executor.live
        for at, request in enumerate(self.driver.requests):
            assert all(sequence.state is SeqStatus.FINISHED for sequence in request.sequences)
            if request.search is None:
                self._judge(at, request)
            elif (at, -1) not in self.stopped:
                assert results(request) == self.wanted_results(request.command)

    def _judge(self, at: int, request: LiveRequest) -> None:
        for sequence in request.sequences:
            got, wanted = output(request, sequence.index), self.wanted(request.command, sequence.index)
            stopped = {(at, -1), (at, sequence.index)} & self.stopped
            assert got == (wanted[: len(got)] if stopped else wanted)

    def wanted(self, command: GenerateCommand, index: int) -> list[int]:
        """Tokens that a sequence must generate."""
        left = command.sampling.max_tokens - command.resumed_tokens
        return expected_output(command.prompt_ids, left, self.VOCAB, command.sampling.stop_token_ids)

    def wanted_results(self, command: GenerateCommand) -> list[list[int]]:
        """Results that a beam search must return."""
        sampling = command.sampling
        ends = frozenset(sampling.stop_token_ids)
        search = beam_search(sampling.beam_width, command.n, 1.0, False, sampling.max_tokens, ends)
        return [list(tokens) for tokens in expected_beams(command.prompt_ids, search, self.VOCAB)]


def _check_sharing(driver: Driver, request: LiveRequest) -> None:
    """Beams hold blocks all or none; without other requests to share with, sequences of one prompt share its blocks."""
    states = [s.state for s in request.sequences if s.state is not SeqStatus.FINISHED]
    if request.search is not None:
        assert len({state is SeqStatus.WAITING for state in states}) <= 1
    elif driver.scheduler.limits.fork_sharing and not driver.scheduler.limits.prefix_cache:
        shared = (len(request.command.prompt_ids) - 1) // driver.block_size
        tables = [s.block_table[:shared].tolist() for s in request.sequences if s.block_table]
        assert all(table == tables[0] for table in tables)


def _check_published(driver: Driver, request: LiveRequest) -> None:
    """Each block that a sequence hit or published is in the table, in its own blocks or in equal ones that
    others hold, however often blocks are evicted.
    """
    if not driver.scheduler.limits.prefix_cache:
        return
    size, table, ref_counts = driver.block_size, driver.pool.table, driver.pool.ref_counts
    for sequence in request.sequences:
        if sequence.state not in HOLDING or not sequence.publishes:
            continue
        if sequence in driver.scheduler._running.shared_prefill._leads:
            continue  # another one has yet to compute, and publish, what the sequence counts as published
        for place, block in enumerate(sequence.block_table[: sequence.num_published]):
            entry = table.lookup(sequence.digests[place])
            assert entry is not None, (sequence.key, block)
            assert entry == block or (table.is_entered(block) and ref_counts[entry])
            assert table.token_ids(entry) == sequence.token_ids[place * size : (place + 1) * size].tolist()


def _check_digests(driver: Driver, request: LiveRequest) -> None:
    """Digests that a sequence has of its blocks are the chain over its tokens."""
    media = request.command.identity.media
    for sequence in request.sequences:
        chain = chain_digests(request.root, sequence.token_ids.tobytes(), driver.block_size, media)
        assert sequence.digests == chain[: len(sequence.digests)]


class WireMachine(SchedulerMachine):
    """Judged by the real executor. More tokens than two: a search has `beam_width` left when others end it."""

    VOCAB = 6
    EOS = (5,)
    DRIVER = WireDriver

    def sampling(self, data: st.DataObject, beam_width: int, max_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "ignore_eos": data.draw(st.booleans()),
            "min_tokens": data.draw(st.integers(0, max_tokens)),
        }
        if beam_width:
            fields["length_penalty"] = data.draw(st.sampled_from([1.0, 0.0, -1.0]))
            fields["early_stopping"] = data.draw(st.booleans())
        else:
            fields["temperature"] = data.draw(st.sampled_from([0.0, 1.0]))
            fields["seed"] = data.draw(st.integers(0, 3))
            fields["logprobs"] = data.draw(st.sampled_from([None, 0, 2]))
        return fields

    def wanted(self, command: GenerateCommand, index: int) -> list[int]:
        return wire_driver.expected_output(command, index, self.VOCAB, self.EOS)

    def wanted_results(self, command: GenerateCommand) -> list[list[int]]:
        return wire_driver.expected_results(command, self.VOCAB, self.EOS)


class GroupMachine(WireMachine):
    """Judged by two ranks of the real executor."""

    DRIVER = GroupDriver

    def teardown(self) -> None:
        super().teardown()
        driver = getattr(self, "driver", None)
        if isinstance(driver, GroupDriver) and driver.group is not None:
            assert driver.group.lost == []
            driver.group.close()
