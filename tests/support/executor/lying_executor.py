"""An oracle process that does not always tell the truth. A script with the executor's flags.

Told "lies", the fifth result of each epoch bears the next one of LIES until there are no more. A sequence that would
sample after FAILING fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from pagekv.executor import choose_backend, server
from pagekv.executor.backend.interface import Backend
from pagekv.executor.config import ExecutorConfig
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.rpc import wire
from pagekv.executor.session.step import ExecutedStep
from pagekv.executor.world import ALONE, World
from pagekv.steps.v1 import executor_service_pb2 as pb

VOCAB, FAILING = 4096, 4095


def _set(name: str, more: int) -> Callable[[pb.StepResult], None]:
    def lie(result: pb.StepResult) -> None:
        setattr(result, name, getattr(result, name) + more)

    return lie


def _beyond_vocabulary(result: pb.StepResult) -> None:
    result.sampled_tokens[0] = VOCAB


def _one_more_token(result: pb.StepResult) -> None:
    result.sampled_tokens.append(1)


def _one_more_sequence(result: pb.StepResult) -> None:
    result.sampled_seqs.append(999)
    result.sampled_tokens.append(1)


def _one_less_sequence(result: pb.StepResult) -> None:
    del result.sampled_seqs[-1], result.sampled_tokens[-1], result.logprobs[-1]


def _the_same_twice(result: pb.StepResult) -> None:
    result.sampled_seqs[-1] = result.sampled_seqs[0]
    del result.logprobs[-1]


def _no_log_probabilities(result: pb.StepResult) -> None:
    del result.logprobs[:]


def _not_a_number(result: pb.StepResult) -> None:
    result.logprobs[0].chosen = float("nan")


def _too_few_likeliest(result: pb.StepResult) -> None:
    del result.logprobs[0].top_token_ids[-1], result.logprobs[0].top_logprobs[-1]


def _likeliest_beyond_vocabulary(result: pb.StepResult) -> None:
    result.logprobs[0].top_token_ids[0] = VOCAB


def _somebody_else_failed(result: pb.StepResult) -> None:
    result.failed_seqs.append(999)
    result.failed_reasons.append(pb.SEQUENCE_FAILURE_NOT_A_NUMBER)


def _failed_without_reason(result: pb.StepResult) -> None:
    result.failed_seqs.append(result.sampled_seqs[0])


# Each with the field that the manager must name.
LIES: list[tuple[str, Callable[[pb.StepResult], None]]] = [
    ("epoch", _set("epoch", 1)),
    ("step", _set("step", 1)),
    ("computed_tokens", _set("computed_tokens", 1)),
    ("sampled_tokens", _beyond_vocabulary),
    ("sampled_tokens", _one_more_token),
    ("sampled_seqs", _one_more_sequence),
    ("sampled_seqs", _one_less_sequence),
    ("sampled_seqs", _the_same_twice),
    ("logprobs", _no_log_probabilities),
    ("logprobs", _not_a_number),
    ("logprobs.top_token_ids", _too_few_likeliest),
    ("logprobs.top_token_ids", _likeliest_beyond_vocabulary),
    ("failed_seqs", _somebody_else_failed),
    ("failed_reasons", _failed_without_reason),
]
_truth = wire.step_result
_lied_in: list[int] = []


def step_result(report: ExecutedStep) -> pb.StepResult:
    """Instead of the service's."""
    result = _truth(report)
    if report.step == 5 and len(_lied_in) < len(LIES) and "lies" in sys.argv[1]:
        LIES[len(_lied_in)][1](result)
        _lied_in.append(report.epoch)
    return result


def load_backend(config: ExecutorConfig, world: World = ALONE, lost: object = None) -> Backend:
    """Instead of the one that flags name."""
    return OracleBackend(OracleModel("", VOCAB, 4096, ()), step_time_s=0.002, failing=(FAILING,))


if __name__ == "__main__":
    choose_backend.load_backend = load_backend
    wire.step_result = step_result
    sys.exit(server.main(sys.argv[2:]))
