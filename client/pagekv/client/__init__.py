"""Client library and command line of PageKV: `PageKVClient`, its asyncio twin, their types and errors.

with PageKVClient("127.0.0.1:50051") as client:
    print(client.generate("In the beginning", max_tokens=40).text)
    with client.stream([{"role": "user", "content": "Hello"}], temperature=0.7) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(stream.completion.finish_reason, stream.completion.cached_tokens)
"""

from pagekv.client.aio import AsyncPageKVClient, AsyncStream
from pagekv.client.client import PageKVClient, Stream
from pagekv.client.errors import (
    AlreadyExists,
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    FailedPrecondition,
    FellBehind,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    NotImplementedYet,
    Overloaded,
    PageKVError,
    ServerError,
    Unavailable,
    Unreachable,
)
from pagekv.client.types import (
    BlockInfo,
    BlockList,
    CacheControls,
    ChatMessage,
    Chunk,
    Completion,
    GenerateOptions,
    MediaHash,
    ModelInfo,
    PositionLogprobs,
    PrefixLookup,
    Prompt,
    SequenceBlocks,
    Stats,
    TokenLogprob,
)

__all__ = [
    "AlreadyExists",
    "AsyncPageKVClient",
    "AsyncStream",
    "BlockInfo",
    "BlockList",
    "CacheControls",
    "Cancelled",
    "ChatMessage",
    "Chunk",
    "Completion",
    "ConnectionLost",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FellBehind",
    "GenerateOptions",
    "InvalidRequest",
    "LimitExceeded",
    "MediaHash",
    "ModelInfo",
    "NotFound",
    "NotImplementedYet",
    "Overloaded",
    "PageKVClient",
    "PageKVError",
    "PositionLogprobs",
    "PrefixLookup",
    "Prompt",
    "SequenceBlocks",
    "ServerError",
    "Stats",
    "Stream",
    "TokenLogprob",
    "Unavailable",
    "Unreachable",
]
