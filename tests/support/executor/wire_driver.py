"""Drives a real Scheduler against the executor's own step check, epoch and oracle, through the messages of the wire.

Nothing of gRPC but its bytes: a plan becomes a StepRequest when it is made, as the engine loop sends it, and what the
executor reads of that is judged by `check_step` before it touches anything, and by the oracle at every slot it reads.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from support.engine.scheduler_driver import Driver
from support.executor.executor_steps import ALL_FEATURES
from support.executor.expected_tokens import chain, choose_token, expected_tokens, mix
from support.executor.rank_group import RankGroup, rank_group

from pagekv.executor.backend.interface import MAX_LOGPROBS, Backend, SequenceState
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.oracle.reference import likeliest
from pagekv.executor.rpc import wire as executor_wire
from pagekv.executor.session.epoch import Epoch
from pagekv.executor.session.state_digest import StateDigest
from pagekv.executor.session.step_check import EpochLimits
from pagekv.kvmanager.engine import executor_wire as wire
from pagekv.kvmanager.engine.steps_in_flight import StepsInFlight
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.scheduling.beam_search import BeamSearch
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb

EPOCH = 9
MAX_MODEL_LEN = 64


class WireExecutor:
    """An epoch over a backend, by default the oracle, that is handed messages as bytes. Raises what the executor
    refuses a step with.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab: int,
        max_sequences: int,
        eos: tuple[int, ...],
        host_blocks: int,
        backend: Backend | None = None,
    ) -> None:
        if backend is None:
            backend = OracleBackend(OracleModel("", vocab, MAX_MODEL_LEN, eos), max_sequences=max_sequences)
        backend.allocate(block_size, num_blocks, host_blocks)
        limits = EpochLimits(
            block_size, num_blocks, host_blocks, vocab, MAX_MODEL_LEN, max_sequences, MAX_LOGPROBS, ALL_FEATURES
        )
        self.epoch = Epoch(EPOCH, "test", limits, backend)
        self._eos = eos
        self._sent: deque[bytes] = deque()
        self._in_flight = StepsInFlight()
        self._in_flight.begin_epoch(vocab)
        self._steps = 0
        self.largest_step = 0

    @property
    def live(self) -> dict[int, SequenceState]:
        """Sequences the executor holds."""
        return self.epoch.live

    def send(self, plan: StepPlan) -> None:
        """The plan as it stands now, as bytes on their way."""
        self._steps += 1
        self._in_flight.add(plan)
        self._sent.append(wire.step_request(plan, EPOCH, self._steps, self._eos).SerializeToString())

    def run(self, plan: StepPlan) -> StepResult:
        """Runs the oldest step that was sent, which must be that of `plan`."""
        sent = self._sent.popleft()
        step = executor_wire.step(sent)
        report = self.epoch.launch(step).collect()
        self.largest_step = max(self.largest_step, report.computed_tokens)
        result = executor_wire.step_result(report).SerializeToString()
        answer = wire.step_result(pb.StepResult.FromString(result))
        answered, checked = self._in_flight.answered(answer)
        assert answered is plan
        self._in_flight.pop()
        return checked


class WireDriver(Driver):
    """A Driver whose executor is the real one, as far as it goes without a process and a model; it takes exactly as
    many sequences as the scheduler may have running.
    """

    def _new_executor(self) -> Any:
        most = self.scheduler.limits.max_running
        return WireExecutor(self.pool.num_blocks, self.block_size, self.vocab, most, self.eos, self.host_blocks)

    def _send(self, plan: StepPlan) -> None:
        self.executor.send(plan)


class GroupDriver(WireDriver):
    """The same, with two ranks: each judges every step."""

    group: RankGroup | None = None

    def _new_executor(self) -> Any:
        most = self.scheduler.limits.max_running
        model = OracleModel("", self.vocab, MAX_MODEL_LEN, self.eos)
        if self.group is not None:
            self.group.close()
        self.group = rank_group(*(OracleBackend(model, max_sequences=most) for _ in range(2)))
        sizes = (self.pool.num_blocks, self.block_size, self.vocab, most, self.eos, self.host_blocks)
        executor = WireExecutor(*sizes, self.group.backend)
        executor.epoch.ranks, executor.epoch.digest = self.group.leader, StateDigest()
        return executor


def expected_output(command: GenerateCommand, index: int, vocab: int, eos: tuple[int, ...]) -> list[int]:
    """The output of a sequence over the oracle, without resumed tokens."""
    sampling, resumed = command.sampling, command.resumed_tokens
    return expected_tokens(
        command.prompt_ids,
        sampling.max_tokens - resumed,
        vocab_size=vocab,
        eos_token_ids=eos,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=max(0, sampling.min_tokens - resumed),
        temperature=sampling.temperature,
        seed=sampling.seed,
        sequence_index=index,
    )


def expected_results(command: GenerateCommand, vocab: int, eos: tuple[int, ...]) -> list[list[int]]:
    """The results of a beam search over the oracle, best first: the search itself, without blocks."""
    sampling = command.sampling
    search = BeamSearch(sampling, command.n, eos)
    while not search.done:
        prefixes = [[*command.prompt_ids, *beam.token_ids] for beam in search.beams]
        search.advance([_candidates(prefix, vocab, eos, search.num_candidates) for prefix in prefixes])
    return [list(result.token_ids) for result in search.results()]


def _candidates(prefix: list[int], vocab: int, eos: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """The oracle's likeliest tokens after a prefix."""
    read = sum(map(mix, chain(prefix))) % 2**64
    token, drawn = choose_token(read, len(prefix), vocab_size=vocab, eos_token_ids=eos)
    return list(likeliest(token, drawn, vocab, count))
