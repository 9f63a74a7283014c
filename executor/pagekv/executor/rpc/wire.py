"""Messages of executor_service.proto to and from the executor's own types. Checks only that it knows every field of a
step (R35): `step_check` does the rest.
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

# Fields of a step at most, with those of the messages inside it, numbers in packed lists not counted: for each sequence
# that enters, and for everything else, block copies above all.
SEQUENCE_FIELDS = 32
COPY_FIELDS = 2**16
# Token and block ids that are taken in at once, one of a block costing a little more than one of a token: about a
# millisecond's work. A new sequence costs as much as so many ids, its sampling above all.
IDS_AT_ONCE, SEQUENCE_IDS = 2**16, 1024
MANY_IDS = 256

_DIRECTIONS: dict[int, CopyDirection] = {
    pb.MEMORY_OP_KIND_COPY: CopyDirection.COPY,
    pb.MEMORY_OP_KIND_SWAP_OUT: CopyDirection.SWAP_OUT,
    pb.MEMORY_OP_KIND_SWAP_IN: CopyDirection.SWAP_IN,
}
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


def attach_order(message: pb.AttachRequest) -> AttachOrder:
    values = {field.name: getattr(message, field.name) for field in fields(AttachOrder)}
    return AttachOrder(**{**values, "required_features": tuple(message.required_features)})


def step(data: bytes) -> Step:
    """The step in the bytes of a message. Raises DecodeError, and InvalidRequest where a field of it is not known."""
    message = pb.StepRequest.FromString(data)
    check_known(message, "R35")
    return _step(message, [_new_sequence(new) for new in message.new_seqs], data)


async def large_step(message: pb.StepRequest, encoded: bytes) -> Step:
    """The step that a message of `read_step` asks for, and the bytes that it came in, with turns of the event loop
    between its new sequences.
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
    """The numbers of a repeated uint32 field. NumPy reads many in a fraction of the time, and takes longer for few."""
    if len(numbers) < MANY_IDS:
        return list(numbers)
    # Not with the module, which the checks before a start import.
    import numpy as np

    found: list[int] = np.asarray(numbers, np.uint32).tolist()
    return found


def _new_sequence(new: pb.NewSequence) -> SequenceState:
    # Not with the module, which the checks before a start import.
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
    """The message in the bytes of a large step, parsed with turns of the event loop. `limits` are those of the epoch
    that is open, None for none. Raises what `check_epoch` does of the message's epoch, as soon as that is read,
    InvalidRequest for a message with more in it than the epoch allows, and DecodeError.
    """
    message = pb.StepRequest()
    for _ in parse_slices(message, data, _bounds(limits)):
        # Libraries write fields in the order of their numbers, in which the epoch is the first.
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
        threads=report.threads,
        rank_us=report.rank_us,
    )


def describe_response(description: BackendDescription) -> pb.DescribeResponse:
    """The message that describes a backend, whose fields have the same names, and the session's own limits."""
    return pb.DescribeResponse(
        **asdict(description), contract_revision=CONTRACT_REVISION, max_steps_in_flight=MAX_IN_FLIGHT
    )
