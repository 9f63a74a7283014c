"""Step plans to, and step results from, the messages of executor_service.proto."""

from __future__ import annotations

from collections.abc import Iterable

from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind, NewSeq, StepPlan, StepResult
from pagekv.steps.v1 import executor_service_pb2 as pb


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


def _memory_ops(copies: list[BlockCopy]) -> list[pb.MemoryOp]:
    """Copies as operations, in order. Copies of one operation are of one kind and may all happen at once: a copy that
    writes a block which an earlier one reads or writes, or reads one which an earlier one writes, begins the next.
    """
    operations: list[tuple[CopyKind, list[int], list[int]]] = []
    last: CopyKind | None = None
    read: set[int] = set()
    written: set[int] = set()
    for kind, source, destination in copies:
        # Only copies have sources and destinations in the same pool.
        meets = destination in written or (kind is CopyKind.COPY and (destination in read or source in written))
        if kind is not last or meets:
            sources: list[int] = []
            destinations: list[int] = []
            operations.append((kind, sources, destinations))
            last, read, written = kind, set(), set()
        sources.append(source)
        destinations.append(destination)
        read.add(source)
        written.add(destination)
    # Each field is filled at once: growing it in the message takes more than twice as long.
    return [
        pb.MemoryOp(kind=_KINDS[kind], sources=sources, destinations=destinations)
        for kind, sources, destinations in operations
    ]


def _new_sequence(new: NewSeq, eos_token_ids: Iterable[int]) -> pb.NewSequence:
    sequence = new.sequence
    return pb.NewSequence(
        seq_id=new.seq_id,
        token_ids=new.token_ids,
        num_prompt_tokens=sequence.num_prompt,
        block_ids=new.block_ids,
        computed_tokens=new.computed_tokens,
        sampling=_sampling(sequence, eos_token_ids),
    )


def _sampling(sequence: Seq, eos_token_ids: Iterable[int]) -> pb.StepSampling:
    params, search = sequence.request.command.sampling, sequence.request.search
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
        # The search chooses a beam's next token, from the likeliest ones.
        logprobs=params.logprobs if search is None else search.num_candidates,
    )


def step_result(message: pb.StepResult) -> StepResult:
    """The result of a step."""
    tokens = dict(zip(message.sampled_seqs, message.sampled_tokens, strict=False)) if message.logprobs else {}
    return StepResult(
        step=message.step,
        sampled_seq_ids=list(message.sampled_seqs),
        sampled_tokens=list(message.sampled_tokens),
        logprobs={
            row.seq_id: TokenLogprobs(
                tokens.get(row.seq_id, 0), row.chosen, tuple(zip(row.top_token_ids, row.top_logprobs, strict=False))
            )
            for row in message.logprobs
        },
        computed_tokens=message.computed_tokens,
        execute_us=message.execute_us,
        idle_us=message.idle_us,
    )
