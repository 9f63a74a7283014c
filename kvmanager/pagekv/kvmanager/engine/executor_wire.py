"""Encodes step plans as messages of executor_service.proto, and decodes step results from such messages."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from pagekv.common.varint import varint
from pagekv.kvmanager.engine.packed import pack_varints, packed_field
from pagekv.kvmanager.engine.recovery import WrongAnswer
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import CopyKind, CopyList, CopyRun, NewSeq, StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb

# Twelve days. No step can have taken longer, and sums of larger values would overflow a counter.
MAX_US = 2**40
MAX_THREADS = 65536
MAX_RANKS = 1024
# By rounding, the logarithm of a probability of 1 may come out so far above 0.
MAX_LOGPROB = 1e-3
# Block tables and copies of more blocks than this are packed by NumPy, which is faster from some hundreds on.
_LONG_TABLE = 1024


def step_request(plan: StepPlan, epoch: int, step: int, eos_token_ids: Iterable[int]) -> pb.StepRequest:
    """The message of one step; `step` counts from 1 within the epoch."""
    return pb.StepRequest(
        epoch=epoch,
        step=step,
        finished_seqs=plan.finished,
        memory_ops=_memory_ops(plan.copies),
        new_seqs=[_new_sequence(new, eos_token_ids) for new in plan.new],
        append_seqs=plan.append_seq_ids,
        append_blocks=plan.append_blocks,
        scheduled_seqs=plan.scheduled_seq_ids,
        scheduled_tokens=plan.scheduled_tokens,
    )


_KINDS = {
    CopyKind.COPY: pb.MEMORY_OP_KIND_COPY,
    CopyKind.SWAP_OUT: pb.MEMORY_OP_KIND_SWAP_OUT,
    CopyKind.SWAP_IN: pb.MEMORY_OP_KIND_SWAP_IN,
}


def _memory_ops(copies: CopyList) -> list[pb.MemoryOp]:
    """Copies as operations, in order. Copies of one operation are of one kind and may all run at once. So a copy begins
    a new operation if it writes a block that an earlier copy of the operation reads or writes, or reads a block that an
    earlier one writes.
    """
    return [_memory_op(*operation) for run in copies.runs for operation in _operations(run)]


def _operations(run: CopyRun) -> list[CopyRun]:
    kind, sources, destinations = run
    # Only CopyKind.COPY has sources and destinations in the same pool.
    if kind is not CopyKind.COPY and not _repeats(destinations):
        return [run]
    operations: list[CopyRun] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in zip(sources, destinations, strict=True):
        meets = destination in written or (kind is CopyKind.COPY and (destination in read or source in written))
        if not operations or meets:
            operations.append(CopyRun(kind, array("I"), array("I")))
            read, written = set(), set()
        operations[-1].sources.append(source)
        operations[-1].destinations.append(destination)
        read.add(source)
        written.add(destination)
    return operations


def _repeats(blocks: array[int]) -> bool:
    """Whether a block is named twice."""
    if len(blocks) > _LONG_TABLE:
        ordered = np.sort(np.frombuffer(blocks, np.uint32))
        return bool((ordered[1:] == ordered[:-1]).any())
    return len(set(blocks)) < len(blocks)


def _memory_op(kind: CopyKind, sources: array[int], destinations: array[int]) -> pb.MemoryOp:
    if len(sources) <= _LONG_TABLE:
        # Each field is filled at once: growing it in the message takes more than twice as long.
        return pb.MemoryOp(kind=_KINDS[kind], sources=sources.tolist(), destinations=destinations.tolist())
    message = pb.MemoryOp(kind=_KINDS[kind])
    message.MergeFromString(packed_field(pb.MemoryOp.SOURCES_FIELD_NUMBER, np.frombuffer(sources, np.uint32)))
    message.MergeFromString(packed_field(pb.MemoryOp.DESTINATIONS_FIELD_NUMBER, np.frombuffer(destinations, np.uint32)))
    return message


def step_bytes(plan: StepPlan, epoch: int, step: int, eos_token_ids: Iterable[int]) -> bytes:
    """`step_request`, serialised. Prompts that were packed ahead are inserted as bytes, in a hundredth of the time."""
    if not any(new.sequence.request.packed_prompt for new in plan.new):
        return step_request(plan, epoch, step, eos_token_ids).SerializeToString()
    parts = [step_request(replace(plan, new=[]), epoch, step, eos_token_ids).SerializeToString()]
    for new in plan.new:
        packed, num_prompt = new.sequence.request.packed_prompt, len(new.sequence.request.command.prompt_ids)
        head = _TOKEN_IDS + varint(len(packed)) if packed else b""
        rest = _new_sequence(new, eos_token_ids, num_prompt if packed else 0).SerializeToString()
        parts += (_NEW_SEQ, varint(len(head) + len(packed) + len(rest)), head, packed, rest)
    return b"".join(parts)


# Tags of fields that are a message or a packed list: field number, and the wire type of fields with a length.
_NEW_SEQ = bytes([pb.StepRequest.NEW_SEQS_FIELD_NUMBER << 3 | 2])
_TOKEN_IDS = bytes([pb.NewSequence.TOKEN_IDS_FIELD_NUMBER << 3 | 2])


def pack_token_ids(token_ids: array[int]) -> bytes:
    """Token ids of a new sequence, encoded as in its message, without tag and length. Parts can be concatenated, and
    are then no longer than the whole.
    """
    return pack_varints(np.frombuffer(token_ids, np.uint32))


def _new_sequence(new: NewSeq, eos_token_ids: Iterable[int], first: int = 0) -> pb.NewSequence:
    """The message of a new sequence, with the token ids from `first` on."""
    sequence, table = new.sequence, new.block_ids
    message = pb.NewSequence(
        seq_id=new.seq_id,
        # A list fills a field in half the time of an array.
        token_ids=new.token_ids[first:].tolist(),
        num_prompt_tokens=sequence.num_prompt,
        block_ids=table.tolist() if len(table) <= _LONG_TABLE else (),
        computed_tokens=new.computed_tokens,
        sampling=_sampling(sequence, eos_token_ids),
    )
    if len(table) > _LONG_TABLE:
        message.MergeFromString(packed_field(pb.NewSequence.BLOCK_IDS_FIELD_NUMBER, np.frombuffer(table, np.int32)))
    return message


def _sampling(sequence: Seq, eos_token_ids: Iterable[int]) -> pb.StepSampling:
    params = sequence.request.command.sampling
    return pb.StepSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        sequence_index=sequence.index,
        min_tokens=params.min_tokens,
        banned_until_min=sorted(params.end_ids(eos_token_ids)) if params.min_tokens else (),
        bias_token_ids=params.logit_bias.keys(),
        biases=params.logit_bias.values(),
        logprobs=sequence.request.num_likeliest,
    )


def step_result(message: pb.StepResult) -> StepResult:
    """The result of a step. Raises WrongAnswer for values that no plan allows; `AnswerCheck` compares with the plan."""
    seq_ids, tokens = list(message.sampled_seqs), list(message.sampled_tokens)
    _check_pair("sampled_tokens", len(tokens), "sampled_seqs", len(seq_ids))
    for field, value in (("execute_us", message.execute_us), ("idle_us", message.idle_us)):
        if value > MAX_US:
            raise WrongAnswer(field, f"must be from 0 to {MAX_US} microseconds, got {value}")
    if message.threads > MAX_THREADS:
        raise WrongAnswer("threads", f"must be from 0 to {MAX_THREADS}, got {message.threads}")
    ranks = tuple(message.rank_us)
    if len(ranks) > MAX_RANKS or max(ranks, default=0) > MAX_US:
        raise WrongAnswer("rank_us", f"must be at most {MAX_RANKS} numbers up to {MAX_US}, got {len(ranks)}")
    return StepResult(
        step=message.step,
        sampled_seq_ids=seq_ids,
        sampled_tokens=tokens,
        logprobs=_logprobs(message, dict(zip(seq_ids, tokens, strict=True))) if message.logprobs else {},
        computed_tokens=message.computed_tokens,
        execute_us=message.execute_us,
        idle_us=message.idle_us,
        failed=_failed(message) if message.failed_seqs or message.failed_reasons else {},
        threads=message.threads,
        rank_us=ranks,
    )


def _logprobs(message: pb.StepResult, tokens: dict[int, int]) -> dict[int, TokenLogprobs]:
    found: dict[int, TokenLogprobs] = {}
    for row in message.logprobs:
        seq_id, ids, values = row.seq_id, list(row.top_token_ids), list(row.top_logprobs)
        if seq_id not in tokens or seq_id in found:
            raise WrongAnswer("logprobs.seq_id", f"must be of sampled_seqs, and each once, got {seq_id}")
        _check_pair("logprobs.top_logprobs", len(values), "top_token_ids", len(ids))
        # A sum is finite only if all its terms are.
        if not math.isfinite(row.chosen + sum(values)):
            odd = next(value for value in (row.chosen, *values) if not math.isfinite(value))
            raise WrongAnswer("logprobs", f"must be finite, got {odd} of sequence {seq_id}")
        if len(set(ids)) < len(ids) or sorted(values, reverse=True) != values:
            raise WrongAnswer("logprobs.top_token_ids", f"must be best first and each once, got {ids} with {values}")
        if (most := max([row.chosen, *values[:1]])) > MAX_LOGPROB:
            raise WrongAnswer("logprobs", f"must be at most 0, got {most} of sequence {seq_id}")
        found[seq_id] = TokenLogprobs(tokens[seq_id], row.chosen, tuple(zip(ids, values, strict=True)))
    return found


def _failed(message: pb.StepResult) -> dict[int, str]:
    seq_ids, reasons = list(message.failed_seqs), list(message.failed_reasons)
    _check_pair("failed_reasons", len(reasons), "failed_seqs", len(seq_ids))
    found = {seq_id: _FAILURES.get(reason, "unknown reason") for seq_id, reason in zip(seq_ids, reasons, strict=True)}
    if len(found) < len(seq_ids):
        raise WrongAnswer("failed_seqs", f"must have each sequence once, got {seq_ids[:8]}")
    return found


_FAILURES: dict[int, str] = {pb.SEQUENCE_FAILURE_NOT_A_NUMBER: "its logits are not numbers"}


def _check_pair(field: str, count: int, other: str, expected: int) -> None:
    if count != expected:
        raise WrongAnswer(field, f"must have as many entries as {other} ({expected}), has {count}")
