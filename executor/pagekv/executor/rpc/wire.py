"""Messages of executor_service.proto to and from the executor's own types. Checks nothing: that is `step_check`."""

from __future__ import annotations

from pagekv.executor.backend.interface import BackendDescription, CopyKind, Sampled
from pagekv.executor.session.step import ExecutedStep, MemoryOp, NewSequence, Step, StepSampling
from pagekv.v1 import executor_service_pb2 as pb

_KINDS: dict[int, CopyKind] = {
    pb.MEMORY_OP_KIND_COPY: CopyKind.COPY,
    pb.MEMORY_OP_KIND_SWAP_OUT: CopyKind.SWAP_OUT,
    pb.MEMORY_OP_KIND_SWAP_IN: CopyKind.SWAP_IN,
}


def step(message: pb.StepRequest) -> Step:
    """The step a message asks for."""
    return Step(
        epoch=message.epoch,
        step=message.step,
        finished_seqs=list(message.finished_seqs),
        memory_ops=[
            MemoryOp(_KINDS.get(op.kind), list(op.sources), list(op.destinations)) for op in message.memory_ops
        ],
        new_seqs=[_new_sequence(new) for new in message.new_seqs],
        append_seqs=list(message.append_seqs),
        append_blocks=list(message.append_blocks),
        scheduled_seqs=list(message.scheduled_seqs),
        scheduled_tokens=list(message.scheduled_tokens),
    )


def _new_sequence(message: pb.NewSequence) -> NewSequence:
    return NewSequence(
        seq_id=message.seq_id,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        block_ids=list(message.block_ids),
        computed_tokens=message.computed_tokens,
        sampling=_sampling(message.sampling) if message.HasField("sampling") else None,
    )


def _sampling(message: pb.StepSampling) -> StepSampling:
    return StepSampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        sequence_index=message.sequence_index,
        min_tokens=message.min_tokens,
        banned_until_min=list(message.banned_until_min),
        bias_token_ids=list(message.bias_token_ids),
        biases=list(message.biases),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def step_result(report: ExecutedStep) -> pb.StepResult:
    """The message that reports a step."""
    return pb.StepResult(
        epoch=report.epoch,
        step=report.step,
        sampled_seqs=report.sampled.keys(),
        sampled_tokens=[sampled.token_id for sampled in report.sampled.values()],
        logprobs=[
            _logprobs(seq_id, sampled.logprob, sampled)
            for seq_id, sampled in report.sampled.items()
            if sampled.logprob is not None
        ],
        computed_tokens=report.computed_tokens,
        execute_us=report.execute_us,
        idle_us=report.idle_us,
    )


def _logprobs(seq_id: int, chosen: float, sampled: Sampled) -> pb.SampledLogprobs:
    return pb.SampledLogprobs(
        seq_id=seq_id,
        chosen=chosen,
        top_token_ids=[token for token, _ in sampled.top],
        top_logprobs=[logprob for _, logprob in sampled.top],
    )


def describe_response(description: BackendDescription) -> pb.DescribeResponse:
    """The message that describes a backend."""
    return pb.DescribeResponse(
        model_id=description.model_id,
        model_fingerprint=description.model_fingerprint,
        num_layers=description.num_layers,
        num_kv_heads=description.num_kv_heads,
        head_size=description.head_size,
        kv_dtype=description.kv_dtype,
        vocab_size=description.vocab_size,
        max_model_len=description.max_model_len,
        bytes_per_block=description.bytes_per_block,
        device_kv_bytes=description.device_kv_bytes,
        host_kv_bytes=description.host_kv_bytes,
        device_to_host_bytes_per_s=description.device_to_host_bytes_per_s,
        host_to_device_bytes_per_s=description.host_to_device_bytes_per_s,
        prefill_tokens_per_s=description.prefill_tokens_per_s,
        layout=description.layout,
        backend=description.backend,
        versions=description.versions,
        eos_token_ids=description.eos_token_ids,
        max_sequences=description.max_sequences,
    )
