"""Random histories of the real scheduler and pool, judged by the fake executor: whatever happens, outputs are right."""

import os

from fake_executor import expected_beams, expected_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_driver import Driver, output, results

from pagekv.kvmanager.beam_search import BeamSearch
from pagekv.kvmanager.request import CacheIdentity
from pagekv.kvmanager.sequence import LiveRequest, SequenceState

# Two tokens only, so prefixes collide all the time.
VOCAB = 2


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.integers(2, 24),
        running=st.integers(1, 6),
        watermark=st.sampled_from([0.0, 0.2]),
        depth=st.sampled_from([1, 2]),
        partial_hits=st.booleans(),
        priority_aging=st.sampled_from([0, 2]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        budget: int,
        running: int,
        watermark: float,
        depth: int,
        partial_hits: bool,
        priority_aging: int,
    ) -> None:
        self.driver = Driver(
            num_blocks,
            block_size,
            budget,
            running,
            watermark,
            True,
            depth,
            vocab=VOCAB,
            partial_hits=partial_hits,
            priority_aging=priority_aging,
        )
        self.capacity = num_blocks * block_size
        self.aborted: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 10),
        priority=st.integers(0, 1),
        n=st.sampled_from([1, 1, 2, 3]),
        namespace=st.sampled_from(["", "", "other"]),
        read=st.sampled_from([True, True, False]),
        write=st.sampled_from([True, True, False]),
        stop=st.sampled_from([(), (), (1,)]),
        resumed=st.sampled_from([0, 0, 3]),
        beam_width=st.sampled_from([0, 0, 0, 1, 2, 3]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        n: int,
        namespace: str,
        read: bool,
        write: bool,
        stop: tuple[int, ...],
        resumed: int,
        beam_width: int,
    ) -> None:
        resumed = min(resumed, max_tokens - 1, len(prompt) - 1) if n == 1 and not beam_width else 0
        beam_width = min(beam_width, self.driver.scheduler.limits.max_running)
        size = self.driver.block_size
        needed = -(-(len(prompt) - resumed + max_tokens - 1) // size) * max(1, beam_width)
        if needed * size <= self.capacity:
            identity = CacheIdentity(namespace=namespace, read=read, write=write)
            n = min(n, beam_width) if beam_width else n
            self.driver.submit(prompt, max_tokens, priority, n, identity, stop, resumed=resumed, beam_width=beam_width)

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
        index = data.draw(st.integers(0, len(self.driver.requests) - 1))
        self.aborted.add(index)
        self.driver.abort(self.driver.requests[index])

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def stop_one_sequence(self, data: st.DataObject) -> None:
        """As for a stop string: the others of its request go on."""
        index = data.draw(st.integers(0, len(self.driver.requests) - 1))
        request = self.driver.requests[index]
        if request.search is None:
            self.aborted.add(index)
            self.driver.scheduler.finish(request.sequences[0])

    @rule()
    def preempt_all(self) -> None:
        self.driver.scheduler.preempt_all()

    @rule()
    def lose_executor(self) -> None:
        self.driver.lose_executor()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()
            assert self.driver.executor.largest_step <= self.driver.scheduler.limits.max_batch_tokens

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.drain()
        assert self.driver.pool.num_active == 0
        assert self.driver.executor.live == {}
        for index, request in enumerate(self.driver.requests):
            self._judge(index, request)

    def _judge(self, index: int, request: LiveRequest) -> None:
        command = request.command
        if command.sampling.beam_width:
            assert all(sequence.state is SequenceState.FINISHED for sequence in request.sequences)
            if index not in self.aborted:
                search = BeamSearch(
                    command.sampling.beam_width,
                    command.n,
                    1.0,
                    False,
                    command.sampling.max_tokens,
                    frozenset(command.sampling.stop_token_ids),
                )
                assert results(request) == [list(t) for t in expected_beams(command.prompt_ids, search, VOCAB)]
            return
        left = command.sampling.max_tokens - command.resumed_tokens
        wanted = expected_output(command.prompt_ids, left, VOCAB, command.sampling.stop_token_ids)
        for sequence in request.sequences:
            assert sequence.state is SequenceState.FINISHED
            got = output(request, sequence.index)
            if index in self.aborted:
                assert got == wanted[: len(got)]
            else:
                assert got == wanted


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(os.environ.get("PAGEKV_TEST_EXAMPLES", "150")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
