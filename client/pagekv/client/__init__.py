"""Client library and command line of PageKV: `PageKVClient`, its asyncio twin, their types and errors.

with PageKVClient("127.0.0.1:50051") as client:
    print(client.generate("In the beginning", max_tokens=40).text)
    with client.stream([{"role": "user", "content": "Hello"}], temperature=0.7) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print(stream.completion.finish_reason, stream.completion.cached_tokens)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagekv.client.aio import AsyncPageKVClient, AsyncStream
    from pagekv.client.client import PageKVClient, Stream
    from pagekv.client.errors import (
        AlreadyExists,
        Cancelled,
        ComputationFailed,
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
    from pagekv.client.table_replica import TableReplica
    from pagekv.client.types import (
        BlockExplanation,
        BlockInfo,
        BlockList,
        BlockRemoved,
        BlockStored,
        CacheControls,
        CacheReset,
        ChatMessage,
        Chunk,
        Completion,
        EventBatch,
        GenerateOptions,
        MediaHash,
        ModelInfo,
        Pin,
        PositionLogprobs,
        PrefixExplanation,
        PrefixLookup,
        Prompt,
        RequestInfo,
        RequestList,
        SequenceBlocks,
        Stats,
        TableCleared,
        Tier,
        TokenLogprob,
    )

__all__ = [
    "AlreadyExists",
    "AsyncPageKVClient",
    "AsyncStream",
    "BlockExplanation",
    "BlockInfo",
    "BlockList",
    "BlockRemoved",
    "BlockStored",
    "CacheControls",
    "CacheReset",
    "Cancelled",
    "ChatMessage",
    "Chunk",
    "Completion",
    "ComputationFailed",
    "ConnectionLost",
    "DeadlineExceeded",
    "EventBatch",
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
    "Pin",
    "PositionLogprobs",
    "PrefixExplanation",
    "PrefixLookup",
    "Prompt",
    "RequestInfo",
    "RequestList",
    "SequenceBlocks",
    "ServerError",
    "Stats",
    "Stream",
    "TableCleared",
    "TableReplica",
    "Tier",
    "TokenLogprob",
    "Unavailable",
    "Unreachable",
]

_MODULES = ("aio", "client", "errors", "table_replica", "types")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Names and modules when they are asked for: with them comes gRPC, which reads only while it is imported what
        it may write to standard error, and the command line has a say in that.
        """
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for module in _MODULES:
            members = vars(import_module(f"{__name__}.{module}"))
            globals().update({found: members[found] for found in __all__ if found in members})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
