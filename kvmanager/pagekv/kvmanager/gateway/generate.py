"""Translates Generate of `vllm.grpc.engine` to PageKV's own messages and back.

Features of vLLM that PageKV lacks are refused by their name in vLLM. All other fields go through the checks of
`pagekv.v1.InferenceService`, whose sampling fields have the same names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from pagekv.common.errors import InvalidRequest
from pagekv.kvmanager.api import validation
from pagekv.kvmanager.api.served_model import Served
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.logprobs import in_turns
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

# Fields of a request that PageKV does not support: media, and transfer of KV caches between managers.
_NO_MEDIA = "PageKV takes no media"
_NO_TRANSFER = "PageKV does not transfer KV caches between instances"
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
# By the path of a prompt's field: its path in vLLM's request.
_PROMPT_FIELDS = {"prompt.token_ids.ids": "tokenized.input_ids", "prompt.text": "text", "prompt": "input"}
_SHARED = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
# vLLM's seeds are signed, PageKV's are unsigned; both have 64 bits.
_SEED_MASK = 2**64 - 1
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
}


def read_request(request: vllm.GenerateRequest, model: EngineInfo) -> pb.GenerateRequest:
    """The request as a message of `pagekv.v1.InferenceService`, whose own checks follow. Raises InvalidRequest.

    0 means the default in `top_p`, `repetition_penalty` and `n`, as in vLLM's servicer, because these fields have no
    presence. Fields about detokenization, such as `skip_special_tokens`, are ignored, because the gateway detokenizes.
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
        read.prompt.text = request.text
    elif request.WhichOneof("input") == "tokenized":
        ids = request.tokenized.input_ids
        validation.check_count("tokenized.input_ids", len(ids), model.max_model_len)
        read.prompt.token_ids.ids.extend(ids)
    return read


async def read_generate(
    request: vllm.GenerateRequest, served: Served, trace_parent: str
) -> tuple[GenerateCommand, list[str]]:
    """As `validation.read_generate`, but refusals name the field of vLLM's request."""
    read = read_request(request, served.model)
    try:
        # vLLM's default is all the room that the prompt leaves.
        return await validation.read_generate(read, served, trace_parent, default_max_tokens=served.model.max_model_len)
    except InvalidRequest as error:
        path, bracket, index = error.field.partition("[")
        if path in _PROMPT_FIELDS:
            raise InvalidRequest(_PROMPT_FIELDS[path] + bracket + index, error.description) from error
        raise


def _read_sampling(params: vllm.SamplingParams) -> types_pb2.SamplingParams:
    # Checked before anything is copied.
    validation.check_sampling_lists(params)
    # ListFields leaves out fields without presence that are 0, so 0 means the same as absent, as in vLLM.
    given = {field.name: value for field, value in params.ListFields()}
    for name, why in _UNSUPPORTED_SAMPLING.items():
        if name in given:
            raise InvalidRequest(f"sampling_params.{name}", f"must be absent: {why}")
    constraint = params.WhichOneof("constraint")
    if constraint is not None:
        raise InvalidRequest(f"sampling_params.{constraint}", "must be absent: PageKV constrains no output")
    if params.logprobs < 0:
        raise InvalidRequest(
            "sampling_params.logprobs", f"must be from 0 to {validation.MAX_LOGPROBS}, got {params.logprobs}"
        )
    for token_id in params.logit_bias:
        if token_id < 0:
            raise InvalidRequest("sampling_params.logit_bias", f"token ids must be 0 or more, got {token_id}")
    if "seed" in given:
        given["seed"] &= _SEED_MASK
    return types_pb2.SamplingParams(**{name: value for name, value in given.items() if name in _SHARED})


async def write_response(response: pb.GenerateResponse, stop_token_ids: Collection[int]) -> vllm.GenerateResponse:
    """A message of the answer, in vLLM's form. `stop_token_ids` are the request's own: only these are reported as
    matched, as vLLM does not report the model's end-of-sequence tokens. The event loop has turns while
    log-probabilities of a whole output are translated.
    """
    if response.WhichOneof("event") == "chunk":
        chunk = response.chunk
        written = vllm.GenerateResponse(
            chunk=vllm.GenerateStreamChunk(
                token_ids=chunk.token_ids,
                prompt_tokens=chunk.prompt_tokens,
                # Only this chunk's tokens, because the gateway adds them up.
                completion_tokens=len(chunk.token_ids),
                cached_tokens=chunk.cached_tokens,
                index=chunk.index,
            )
        )
        if chunk.logprobs:
            _add_logprobs(written.chunk.output_logprobs, chunk.logprobs)
        return written
    complete = response.complete
    written = vllm.GenerateResponse(
        complete=vllm.GenerateComplete(
            output_ids=complete.token_ids,
            finish_reason=_FINISH_REASONS[complete.finish_reason],
            prompt_tokens=complete.prompt_tokens,
            completion_tokens=complete.completion_tokens,
            cached_tokens=complete.cached_tokens,
            index=complete.index,
        )
    )
    matched = complete.WhichOneof("matched_stop")
    if matched == "stop_string":
        written.complete.matched_stop_str = complete.stop_string
    elif matched == "stop_token_id" and complete.stop_token_id in stop_token_ids:
        written.complete.matched_token_id = complete.stop_token_id
    async for some in in_turns(complete.logprobs):
        _add_logprobs(written.complete.output_logprobs, some)
    return written


def _add_logprobs(written: vllm.OutputLogProbs, positions: Iterable[types_pb2.PositionLogprobs]) -> None:
    for position in positions:
        written.token_ids.append(position.chosen.token_id)
        written.token_logprobs.append(position.chosen.logprob)
        if position.top:
            top = position.top
            written.top_logprobs.add(token_ids=[t.token_id for t in top], values=[t.logprob for t in top])
