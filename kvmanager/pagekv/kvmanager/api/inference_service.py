"""pagekv.v1.InferenceService: thin handlers between gRPC and the engine loop."""

from __future__ import annotations

import asyncio
from typing import Any

from pagekv.common.errors import InvalidRequest, Unavailable
from pagekv.common.varint import varint
from pagekv.common.version import pagekv_version
from pagekv.kvmanager.access.caller import tenant_in_reach
from pagekv.kvmanager.api.generate_call import GenerateCall
from pagekv.kvmanager.api.prompt_reader import PromptReader, check_token_ids, decode, token_array
from pagekv.kvmanager.api.served_model import ServedModel
from pagekv.kvmanager.api.validation import count_text, read_abort_ids, read_generate
from pagekv.kvmanager.engine.capacity import longest_sequence
from pagekv.kvmanager.engine.loop import EngineLoop
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import inference_service_pb2_grpc as pb_grpc

# Most token ids in an answer of Tokenize and in a request to Detokenize.
MAX_CODEC_TOKENS = 2**20
# The tag of Detokenize's text field, which stands before the length of the text.
_TEXT_TAG = varint(pb.DetokenizeResponse.TEXT_FIELD_NUMBER << 3 | 2)
# Ids of Tokenize's answer that are serialised between two turns of the event loop.
ANSWERED_AT_ONCE = 16 * 2**10


class InferenceService(pb_grpc.InferenceServiceServicer):
    """Errors are raised as `PageKVError`; the server's interceptor turns them into statuses."""

    def __init__(self, engine: EngineLoop, served_model: ServedModel) -> None:
        self._engine = engine
        self._served_model = served_model

    async def Generate(  # type: ignore[override]  # the stubs know no handlers that write by themselves
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        served = self._served_model.served()
        command, stops = await read_generate(request, served, trace_parent_of(context))
        call = GenerateCall(self._engine, served, command, stops, only_complete=request.only_complete)
        # A field that is sent twice counts once, but both values stay in memory with the message.
        del request
        # The callback runs even if the call is cancelled while a message is being written; a `finally` here would not.
        context.add_done_callback(lambda _: call.close())
        await call.run(lambda message: context.write(message.SerializeToString()))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        ids, tenant = read_abort_ids(request.request_ids), tenant_in_reach()
        return pb.AbortResponse(aborted_request_ids=[name for name in ids if self._engine.abort(name, tenant)])

    async def Tokenize(  # type: ignore[override]  # the answer is serialised here
        self, request: pb.TokenizeRequest, context: Any
    ) -> bytes:
        served = self._served_model.served()
        reader = PromptReader(
            served.tokenizer, served.model.vocab_size, MAX_CODEC_TOKENS, "what Tokenize answers with at most"
        )
        count_text(request.prompt, served.asking)
        prompt = await reader.read(request.prompt)
        parts = []
        # Serialised messages, concatenated, are one message. The event loop has a turn between them.
        for start in range(0, len(prompt), ANSWERED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            # A list fills a field in half the time that an array takes.
            part = pb.TokenizeResponse(token_ids=prompt[start : start + ANSWERED_AT_ONCE].tolist())
            parts.append(part.SerializeToString())
        return b"".join(parts)

    async def Detokenize(  # type: ignore[override]  # the answer is serialised here
        self, request: pb.DetokenizeRequest, context: Any
    ) -> bytes:
        served = self._served_model.served()
        tokenizer = served.tokenizer
        if tokenizer is None:
            raise InvalidRequest("token_ids", "this deployment has no tokenizer")
        if len(request.token_ids) > MAX_CODEC_TOKENS:
            raise InvalidRequest("token_ids", f"must have at most {MAX_CODEC_TOKENS} ids, has {len(request.token_ids)}")
        ids = token_array(request.token_ids)
        if not ids:
            return b""
        check_token_ids("token_ids", ids, served.model.vocab_size)
        text = await decode(tokenizer, ids)
        # Written as bytes: a str, a message field and its serialisation would copy megabytes of text four times.
        return _TEXT_TAG + varint(len(text)) + text

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        try:
            served = self._served_model.served()
        except Unavailable as error:
            error.server_version = pagekv_version()
            raise
        tokenizer = served.tokenizer
        return pb.GetModelInfoResponse(
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
            max_sequence_tokens=longest_sequence(served.model, 0),
            server_version=pagekv_version(),
            **served.model.shown(),
        )


def trace_parent_of(context: Any) -> str:
    """The `traceparent` in the metadata of a gRPC call; "" when there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
