"""The stubs of the contract before it got its lasting names, against present processes: what both have works as it did,
and what changed is refused by its number, or by the name of the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from support.clients.calls import Caller, request_for
from support.clients.old_contract import message
from support.clients.stack import ORACLE, Stack, running_stack

from pagekv.client.errors import FailedPrecondition, InvalidRequest, from_rpc_error

pytestmark = pytest.mark.e2e

INFERENCE, CACHE, OPERATOR = (f"pagekv.v1.{name}Service" for name in ("Inference", "Cache", "Operator"))
STEPS = "pagekv.steps.v1.ExecutorService"


class OldCaller:
    """Calls by path with messages of the old stubs."""

    def __init__(self, target: str) -> None:
        # Any: the type stubs know a channel by the messages of generated code.
        self._channel: Any = grpc.aio.insecure_channel(target)

    async def __aenter__(self) -> OldCaller:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    def call(self, service: str, method: str, request: Any = None, **fields: Any) -> Any:
        """`request` where it is not the old message of the method with these fields."""
        kind = self._channel.unary_stream if method in ("Generate", "WatchEvents") else self._channel.unary_unary
        answer = "StepResult" if method == "Run" else f"{method}Response"
        made = kind(
            f"/{service}/{method}",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=message(answer).FromString,
        )
        return made(request if request is not None else message(f"{method}Request")(**fields), timeout=60)


def run(stack: Stack, body: Callable[[OldCaller], Awaitable[None]], target: str = "") -> None:
    async def main() -> None:
        async with OldCaller(target or stack.target) as old:
            await body(old)

    asyncio.run(main())


@pytest.fixture(scope="module")
def stack() -> Any:
    with running_stack([*ORACLE, "--step-time-ms", "2"]) as running:
        yield running


def test_calls_that_have_not_changed(stack: Stack) -> None:
    async def body(old: OldCaller) -> None:
        info = await old.call(INFERENCE, "GetModelInfo")
        assert (info.backend, info.block_size, info.has_tokenizer) == ("oracle", 16, True)
        assert (await old.call(INFERENCE, "Detokenize", token_ids=[])).text == ""
        assert (await old.call(INFERENCE, "Abort", request_ids=["nobody"])).aborted == []
        assert (await old.call(CACHE, "UnpinPrefix", pin_id="pin-0")).unpinned_tokens == 0

    run(stack, body)


def test_answers_are_read_as_they_were(stack: Stack) -> None:
    """Requests have other fields now; answers have more of them, which old readers skip."""

    async def body(old: OldCaller) -> None:
        request = request_for([1, 2, 3], 30, ignore_eos=True)
        async with Caller(stack.target) as caller:
            wanted = await caller.generate(request)
        answers = [answer async for answer in old.call(INFERENCE, "Generate", request)]
        assert [token for answer in answers for token in answer.chunk.token_ids] == wanted.tokens
        end = answers[-1].complete
        assert (list(end.output_ids), end.text, end.finish_reason) == (wanted.tokens, wanted.text, 2)
        assert (end.prompt_tokens, end.completion_tokens) == (3, 30)
        # Of operators now, with the old messages.
        stats = await old.call(OPERATOR, "GetStats")
        assert (stats.num_blocks > 0, stats.requests_total >= 2, stats.executor_attached) == (True, True, True)
        (batch,) = [batch async for batch in old.call(OPERATOR, "WatchEvents", snapshot_only=True)]
        assert (batch.sequence, batch.snapshot, len(batch.events)) == (1, True, stats.published_blocks)

    run(stack, body)


async def end_of(call: Any) -> Any:
    """The answer, or the answers of a stream."""
    return [answer async for answer in call] if hasattr(call, "__aiter__") else await call


async def refusal(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await end_of(call)
    return caught.value


@pytest.mark.parametrize(
    ("service", "method", "fields", "number"),
    [
        (INFERENCE, "Generate", {"text": "x"}, "2"),
        (INFERENCE, "Generate", {"tokenized": {"input_ids": [1]}}, "3"),
        (INFERENCE, "Generate", {"chat": {"messages": [{"role": "user", "content": "x"}]}}, "4"),
        (INFERENCE, "Generate", {"resumed_tokens": 1}, "8"),
        (INFERENCE, "Generate", {"cache": {"adapter_id": "a"}}, "cache.2"),
        (INFERENCE, "Generate", {"cache": {"no_read": True}}, "cache.4"),
        (INFERENCE, "Generate", {"cache": {"no_write": True}}, "cache.5"),
        (INFERENCE, "Tokenize", {"text": "x"}, "1"),
        (INFERENCE, "Tokenize", {"chat": {}}, "2"),
        (CACHE, "LookupPrefix", {"text": "x"}, "1"),
        (CACHE, "ExplainPrefix", {"tokenized": {"input_ids": [1]}}, "2"),
        (CACHE, "ExplainPrefix", {"limit": 4}, "6"),
        (CACHE, "PinPrefix", {"chat": {}, "lease_seconds": 1}, "3"),
        (OPERATOR, "ListRequests", {"limit": 4}, "1"),
        (OPERATOR, "ListBlocks", {"start": 4}, "1"),
        (OPERATOR, "WatchEvents", {"omit_token_ids": True}, "1"),
    ],
)
def test_fields_that_moved_are_refused_and_not_ignored(
    stack: Stack, service: str, method: str, fields: dict[str, Any], number: str
) -> None:
    async def body(old: OldCaller) -> None:
        error = from_rpc_error(await refusal(old.call(service, method, **fields)), stack.target)
        assert isinstance(error, InvalidRequest)
        assert error.field == number
        assert f"has no field {number.rpartition('.')[2]} of " in error.description

    run(stack, body)


@pytest.mark.parametrize(
    "method", ["GetStats", "ListRequests", "GetBlockTable", "ListBlocks", "ResetPrefixCache", "WatchEvents"]
)
def test_calls_that_moved_are_not_here(stack: Stack, method: str) -> None:
    async def body(old: OldCaller) -> None:
        assert (await refusal(old.call(CACHE, method))).code() is grpc.StatusCode.UNIMPLEMENTED

    run(stack, body)


def test_an_old_manager_is_told_what_it_lacks(stack: Stack) -> None:
    """The steps have a package of their own; an old manager that finds them names no revision."""

    async def body(old: OldCaller) -> None:
        moved = await refusal(old.call("pagekv.v1.ExecutorService", "Describe", block_size=16, token_budget=64))
        assert moved.code() is grpc.StatusCode.UNIMPLEMENTED
        described = await old.call(STEPS, "Describe", block_size=16, token_budget=64)
        assert (described.backend, described.layout != "") == ("oracle", True)
        attach = {"manager_id": "old", "block_size": 16, "num_device_blocks": 4, "layout": described.layout}
        error = from_rpc_error(await refusal(old.call(STEPS, "Attach", **attach)), "the executor")
        assert isinstance(error, FailedPrecondition)
        assert (error.kind, error.subject) == ("CONTRACT_REVISION", "0")

    run(stack, body, stack.executor.target)
