"""Translates Generate of `vllm.grpc.engine` to PageKV's own messages and back.

Features of vLLM that PageKV lacks are refused by their name in vLLM; everything else goes through the checks of
`pagekv.v1.InferenceService`, whose sampling fields have the same names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api.validation import MAX_LOGPROBS
from pagekv.kvmanager.engine.capacity import longest_sequence
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

# Fields of a request that have no meaning here: nothing loads media, and no cache moves between managers.
_NO_MEDIA = "PageKV takes no media"
_NO_TRANSFER = "PageKV hands no KV cache from one instance to another"
_UNSUPPORTED = {
    "mm_inputs": _NO_MEDIA,
    "extra_mm_inputs": _NO_MEDIA,
    "media_refs": _NO_MEDIA,
    "kv_transfer_params": _NO_TRANSFER,
    "kv_transfer_params_json": _NO_TRANSFER,
}
_UNSUPPORTED_SAMPLING = {
    "prompt_logprobs": "PageKV computes no log-probabilities of prompts",
    "truncate_prompt_tokens": "PageKV never cuts a prompt",
}
# Seeds are signed there, and any 64 bits here.
_SEED_MASK = 2**64 - 1
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
}


def read_request(request: vllm.GenerateRequest, model: EngineInfo) -> pb.GenerateRequest:
    """The same request to `pagekv.v1.InferenceService`, not checked any further. Raises InvalidRequest.

    In `top_p`, `repetition_penalty` and `n`, which have no presence, 0 means the default, as in vLLM's servicer. Fields
    about text made of tokens (`skip_special_tokens` and its kin) are ignored: the gateway makes the text.
    """
    given = {field.name for field, _ in request.ListFields()}
    for name, why in _UNSUPPORTED.items():
        if name in given:
            raise InvalidRequest(name, f"must be absent: {why}")
    if request.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank", f"must be 0 or absent, got {request.data_parallel_rank}")
    read = pb.GenerateRequest(
        request_id=request.request_id,
        sampling_params=_read_sampling(request.sampling_params),
        only_complete=not request.stream,
    )
    if request.WhichOneof("input") == "text":
        read.text = request.text
    elif request.WhichOneof("input") == "tokenized":
        ids = request.tokenized.input_ids
        read.tokenized.input_ids.extend(ids)
        left = longest_sequence(model, 0) - len(ids)
        # vLLM's default is all the room the prompt leaves. Without room the prompt is refused by its own field.
        if not request.sampling_params.HasField("max_tokens") and left > 0:
            read.sampling_params.max_tokens = left
    return read


def _read_sampling(params: vllm.SamplingParams) -> types_pb2.SamplingParams:
    for name, why in _UNSUPPORTED_SAMPLING.items():
        if params.HasField(name):
            raise InvalidRequest(f"sampling_params.{name}", f"must be absent: {why}")
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequest(f"sampling_params.{constraint}", "must be absent: PageKV constrains no output")
    read = types_pb2.SamplingParams(
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        n=params.n or 1,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    if params.HasField("temperature"):
        read.temperature = params.temperature
    if params.HasField("max_tokens"):
        read.max_tokens = params.max_tokens
    if params.HasField("seed"):
        read.seed = params.seed & _SEED_MASK
    if params.HasField("logprobs"):
        if params.logprobs < 0:
            raise InvalidRequest("sampling_params.logprobs", f"must be from 0 to {MAX_LOGPROBS}, got {params.logprobs}")
        read.logprobs = params.logprobs
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidRequest("sampling_params.logit_bias", f"token ids must be 0 or more, got {token_id}")
        read.logit_bias[token_id] = bias
    return read


def write_response(response: pb.GenerateResponse, stop_token_ids: Collection[int]) -> vllm.GenerateResponse:
    """A message of the answer. `stop_token_ids` are the request's own: vLLM does not report that an end token of the
    model matched.
    """
    if response.WhichOneof("event") == "chunk":
        return vllm.GenerateResponse(chunk=_chunk(response.chunk))
    return vllm.GenerateResponse(complete=_complete(response.complete, stop_token_ids))


def _chunk(chunk: pb.GenerateChunk) -> vllm.GenerateStreamChunk:
    return vllm.GenerateStreamChunk(
        token_ids=chunk.token_ids,
        prompt_tokens=chunk.prompt_tokens,
        # Tokens of this chunk alone: the gateway adds them up.
        completion_tokens=len(chunk.token_ids),
        cached_tokens=chunk.cached_tokens,
        output_logprobs=_logprobs(chunk.logprobs),
        index=chunk.index,
    )


def _complete(complete: pb.GenerateComplete, stop_token_ids: Collection[int]) -> vllm.GenerateComplete:
    written = vllm.GenerateComplete(
        output_ids=complete.output_ids,
        finish_reason=_FINISH_REASONS[complete.finish_reason],
        prompt_tokens=complete.prompt_tokens,
        completion_tokens=complete.completion_tokens,
        cached_tokens=complete.cached_tokens,
        output_logprobs=_logprobs(complete.logprobs),
        index=complete.index,
    )
    matched = complete.WhichOneof("matched_stop")
    if matched == "stop_string":
        written.matched_stop_str = complete.stop_string
    elif matched == "stop_token_id" and complete.stop_token_id in stop_token_ids:
        written.matched_token_id = complete.stop_token_id
    return written


def _logprobs(positions: Iterable[types_pb2.PositionLogprobs]) -> vllm.OutputLogProbs | None:
    """None where none were asked for."""
    written = vllm.OutputLogProbs()
    for position in positions:
        written.token_ids.append(position.chosen.token_id)
        written.token_logprobs.append(position.chosen.logprob)
        if position.top:
            written.top_logprobs.append(
                vllm.TopLogProbs(
                    token_ids=[top.token_id for top in position.top], values=[top.logprob for top in position.top]
                )
            )
    return written if written.token_ids else None
