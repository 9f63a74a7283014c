"""Messages of executor_service.proto to and from the executor's own types. Checks only that it knows every field of a
step (R35): `step_check` does the rest.
"""

from __future__ import annotations

from dataclasses import asdict, fields

from pagekv.common.unknown_fields import check_known
from pagekv.executor.backend.interface import (
    BackendDescription,
    BlockCopies,
    CopyDirection,
    Sampling,
    SequenceState,
)
from pagekv.executor.session.attach_check import CONTRACT_REVISION, AttachOrder
from pagekv.executor.session.step import NO_SAMPLING, ExecutedStep, Step
from pagekv.executor.session.step_stream import MAX_IN_FLIGHT
from pagekv.steps.v1 import executor_service_pb2 as pb

_DIRECTIONS: dict[int, CopyDirection] = {
    pb.MEMORY_OP_KIND_COPY: CopyDirection.COPY,
    pb.MEMORY_OP_KIND_SWAP_OUT: CopyDirection.SWAP_OUT,
    pb.MEMORY_OP_KIND_SWAP_IN: CopyDirection.SWAP_IN,
}
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def attach_order(message: pb.AttachRequest) -> AttachOrder:
    """The attachment a message asks for."""
    values = {field.name: getattr(message, field.name) for field in fields(AttachOrder)}
    return AttachOrder(**{**values, "required_features": tuple(message.required_features)})


def step(message: pb.StepRequest) -> Step:
    """The step a message asks for. Raises InvalidRequest where a field of it is not known."""
    check_known(message, "R35")
    return Step(
        epoch=message.epoch,
        step=message.step,
        finished_seqs=list(message.finished_seqs),
        memory_ops=[
            BlockCopies(_DIRECTIONS.get(op.kind), list(op.sources), list(op.destinations)) for op in message.memory_ops
        ],
        new_seqs=[
            SequenceState(
                seq_id=new.seq_id,
                token_ids=list(new.token_ids),
                num_prompt_tokens=new.num_prompt_tokens,
                block_table=list(new.block_ids),
                computed_tokens=new.computed_tokens,
                sampling=_sampling(new.sampling) if new.HasField("sampling") else NO_SAMPLING,
            )
            for new in message.new_seqs
        ],
        append_seqs=list(message.append_seqs),
        append_blocks=list(message.append_blocks),
        scheduled_seqs=list(message.scheduled_seqs),
        scheduled_tokens=list(message.scheduled_tokens),
    )


def _sampling(message: pb.StepSampling) -> Sampling:
    values = {name: getattr(message, name) for name in _SAMPLING_FIELDS}
    for name in ("banned_until_min", "bias_token_ids", "biases"):
        values[name] = tuple(values[name])
    if not message.HasField("logprobs"):
        values["logprobs"] = None
    return Sampling(**values)


def step_result(report: ExecutedStep) -> pb.StepResult:
    """The message that reports a step."""
    return pb.StepResult(
        epoch=report.epoch,
        step=report.step,
        sampled_seqs=report.sampled.keys(),
        sampled_tokens=[sampled.token_id for sampled in report.sampled.values()],
        logprobs=[
            pb.SampledLogprobs(
                seq_id=seq_id,
                chosen=sampled.logprob,
                top_token_ids=[token for token, _ in sampled.top],
                top_logprobs=[logprob for _, logprob in sampled.top],
            )
            for seq_id, sampled in report.sampled.items()
            if sampled.logprob is not None
        ],
        computed_tokens=report.computed_tokens,
        execute_us=report.execute_us,
        idle_us=report.idle_us,
        failed_seqs=report.failed,
        failed_reasons=[pb.SEQUENCE_FAILURE_NOT_A_NUMBER] * len(report.failed),
    )


def describe_response(description: BackendDescription) -> pb.DescribeResponse:
    """The message that describes a backend, whose fields have the same names, and the session's own limits."""
    return pb.DescribeResponse(
        **asdict(description), contract_revision=CONTRACT_REVISION, max_steps_in_flight=MAX_IN_FLIGHT
    )
