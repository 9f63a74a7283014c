"""Converts messages of executor_service.proto to and from the executor's own types. The only check here is that every
field of a step is known (R35); `step_check` makes all others.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields

from pagekv.common.large_messages import Bounds, parse_slices
from pagekv.common.unknown_fields import check_known
from pagekv.executor.backend.interface import BackendDescription, BlockCopies, CopyDirection, Sampling, SequenceState
from pagekv.executor.session.attach_check import CONTRACT_REVISION, AttachOrder
from pagekv.executor.session.step import NO_SAMPLING, ExecutedStep, Step
from pagekv.executor.session.step_check import EpochLimits
from pagekv.executor.session.step_stream import MAX_IN_FLIGHT
from pagekv.steps.v1 import executor_service_pb2 as pb

# The most fields of a step, including those of nested messages but not numbers in packed lists: SEQUENCE_FIELDS for
# each new sequence, COPY_FIELDS for everything else, mostly block copies.
SEQUENCE_FIELDS = 32
COPY_FIELDS = 2**16
# Token and block ids that are converted in one turn of the event loop, which takes about a millisecond. A new sequence,
# mostly its sampling, costs as much as SEQUENCE_IDS ids.
IDS_AT_ONCE, SEQUENCE_IDS = 2**16, 1024
MANY_IDS = 256

_DIRECTIONS: dict[int, CopyDirection] = {
    pb.MEMORY_OP_KIND_COPY: CopyDirection.COPY,
    pb.MEMORY_OP_KIND_SWAP_OUT: CopyDirection.SWAP_OUT,
    pb.MEMORY_OP_KIND_SWAP_IN: CopyDirection.SWAP_IN,
}
# The least float32, for the logarithm of a probability of 0.
LEAST_LOGPROB = -3.4028234663852886e38
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def attach_order(message: pb.AttachRequest) -> AttachOrder:
    values = {field.name: getattr(message, field.name) for field in fields(AttachOrder)}
    return AttachOrder(**{**values, "required_features": tuple(message.required_features)})


def step(data: bytes) -> Step:
    """Decodes a step. Raises DecodeError, and InvalidRequest if a field is unknown."""
    message = pb.StepRequest.FromString(data)
    check_known(message, "R35")
    return _step(message, [_new_sequence(new) for new in message.new_seqs], data)


async def large_step(message: pb.StepRequest, encoded: bytes) -> Step:
    """Converts a message of `read_step` into a step, with turns of the event loop between its new sequences.
    `encoded`: the bytes of the message.
    """
    new_seqs: list[SequenceState] = []
    ids = 0
    for new in message.new_seqs:
        if ids >= IDS_AT_ONCE:
            ids = 0
            await asyncio.sleep(0)
        new_seqs.append(_new_sequence(new))
        ids += SEQUENCE_IDS + len(new.token_ids) + len(new.block_ids)
    return _step(message, new_seqs, encoded)


def _step(message: pb.StepRequest, new_seqs: list[SequenceState], encoded: bytes) -> Step:
    return Step(
        epoch=message.epoch,
        step=message.step,
        finished_seqs=list(message.finished_seqs),
        memory_ops=[
            BlockCopies(_DIRECTIONS.get(op.kind), _ids(op.sources), _ids(op.destinations)) for op in message.memory_ops
        ],
        new_seqs=new_seqs,
        append_seqs=list(message.append_seqs),
        append_blocks=list(message.append_blocks),
        scheduled_seqs=list(message.scheduled_seqs),
        scheduled_tokens=list(message.scheduled_tokens),
        encoded=encoded,
    )


def _ids(numbers: Sequence[int]) -> list[int]:
    """The numbers of a repeated uint32 field. NumPy reads many numbers in a fraction of the time, but takes longer for
    few.
    """
    if len(numbers) < MANY_IDS:
        return list(numbers)
    # Imported here, because the checks before a start import this module and need no NumPy.
    import numpy as np

    found: list[int] = np.asarray(numbers, np.uint32).tolist()
    return found


def _new_sequence(new: pb.NewSequence) -> SequenceState:
    # Imported here, because the checks before a start import this module and need no NumPy.
    import numpy as np

    # NumPy reads a repeated field in a fraction of the time that a list takes.
    token_ids = array("i")
    token_ids.frombytes(np.asarray(new.token_ids, np.uint32).view(np.uint8).data)
    return SequenceState(
        seq_id=new.seq_id,
        token_ids=token_ids,
        num_prompt_tokens=new.num_prompt_tokens,
        block_table=_ids(new.block_ids),
        computed_tokens=new.computed_tokens,
        sampling=_sampling(new.sampling) if new.HasField("sampling") else NO_SAMPLING,
    )


async def read_step(data: bytes, limits: EpochLimits | None, check_epoch: Callable[[int], None]) -> pb.StepRequest:
    """Parses the bytes of a large step, with turns of the event loop. `limits`: of the current epoch, None if there is
    none. `check_epoch` is called with the message's epoch as soon as that is read, and its errors are raised. Also
    raises InvalidRequest for a message with more fields or ids than the epoch allows, and DecodeError.
    """
    message = pb.StepRequest()
    for _ in parse_slices(message, data, _bounds(limits)):
        # Libraries write fields in the order of their numbers, so the epoch comes first.
        if message.epoch:
            check_epoch(message.epoch)
        await asyncio.sleep(0)
    check_epoch(message.epoch)
    return message


def _bounds(limits: EpochLimits | None) -> Bounds:
    if limits is None:
        return Bounds(unknown_rule="R35")
    name = pb.NewSequence.DESCRIPTOR.full_name
    lists = {f"{name}.token_ids": (limits.max_model_len, "R11"), f"{name}.block_ids": (limits.max_blocks, "R14")}
    return Bounds(COPY_FIELDS + SEQUENCE_FIELDS * limits.max_sequences, lists=lists, unknown_rule="R35")


def _sampling(message: pb.StepSampling) -> Sampling:
    values = {name: getattr(message, name) for name in _SAMPLING_FIELDS}
    for name in ("banned_until_min", "bias_token_ids", "biases"):
        values[name] = tuple(values[name])
    if not message.HasField("logprobs"):
        values["logprobs"] = None
    return Sampling(**values)


def step_result(report: ExecutedStep) -> pb.StepResult:
    return pb.StepResult(
        epoch=report.epoch,
        step=report.step,
        sampled_seqs=report.sampled.keys(),
        sampled_tokens=[sampled.token_id for sampled in report.sampled.values()],
        logprobs=[
            pb.SampledLogprobs(
                seq_id=seq_id,
                chosen=max(sampled.logprob, LEAST_LOGPROB),
                top_token_ids=[token for token, _ in sampled.top],
                top_logprobs=[max(logprob, LEAST_LOGPROB) for _, logprob in sampled.top],
            )
            for seq_id, sampled in report.sampled.items()
            if sampled.logprob is not None
        ],
        computed_tokens=report.computed_tokens,
        execute_us=report.execute_us,
        idle_us=report.idle_us,
        failed_seqs=report.failed,
        failed_reasons=[pb.SEQUENCE_FAILURE_NOT_A_NUMBER] * len(report.failed),
        threads=report.threads,
        rank_us=report.rank_us,
    )


def describe_response(description: BackendDescription) -> pb.DescribeResponse:
    """The message that describes a backend, whose fields have the same names, and the session's own limits."""
    return pb.DescribeResponse(
        **asdict(description), contract_revision=CONTRACT_REVISION, max_steps_in_flight=MAX_IN_FLIGHT
    )
