"""Generate calls over plain gRPC stubs for tests and benchmarks, so that they judge the wire and not our client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.prompts import as_prompt

from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import inference_service_pb2_grpc as pb_grpc
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import operator_service_pb2_grpc as operator_grpc
from pagekv.v1 import types_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass
class Result:
    """The stream of one sequence: chunks joined, and GenerateComplete."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    complete: pb.GenerateComplete | None = None
    # Seconds since the call, one per chunk.
    chunk_times: list[float] = field(default_factory=list)

    @property
    def cached_tokens(self) -> int:
        assert self.complete is not None
        return self.complete.cached_tokens


def request_for(prompt: Sequence[int] | str, max_tokens: int = 16, **sampling: Any) -> pb.GenerateRequest:
    """A greedy request by default; `sampling` are fields of SamplingParams."""
    params = types_pb2.SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    return pb.GenerateRequest(prompt=as_prompt(prompt), sampling_params=params)


def aio_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """With TLS where there are credentials."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


class Caller:
    """One aio channel to a manager."""

    def __init__(
        self,
        target: str,
        options: Sequence[tuple[str, Any]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.channel = aio_channel(target, credentials, [*OPTIONS, *options])
        self.inference = cast("pb_grpc.InferenceServiceAsyncStub", pb_grpc.InferenceServiceStub(self.channel))
        self.operator = cast("operator_grpc.OperatorServiceAsyncStub", operator_grpc.OperatorServiceStub(self.channel))

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()

    async def generate_all(self, request: pb.GenerateRequest, deadline_s: float = 600.0) -> dict[int, Result]:
        """Every sequence of a request, by index, to its end."""
        results: dict[int, Result] = {}
        start = time.perf_counter()
        async for response in self.inference.Generate(request, timeout=deadline_s):
            if response.HasField("chunk"):
                result = results.setdefault(response.chunk.index, Result())
                result.tokens += response.chunk.token_ids
                result.text += response.chunk.text
                result.chunk_times.append(time.perf_counter() - start)
            else:
                results.setdefault(response.complete.index, Result()).complete = response.complete
        return results

    async def generate(self, request: pb.GenerateRequest, deadline_s: float = 600.0) -> Result:
        """A request with n = 1."""
        return (await self.generate_all(request, deadline_s))[0]

    async def generate_many(self, requests: Sequence[pb.GenerateRequest]) -> list[Result]:
        """All at once."""
        return list(await asyncio.gather(*(self.generate(request) for request in requests)))

    async def run_out_of_time(self, request: pb.GenerateRequest) -> None:
        """Calls that are not done before their deadline, with ever longer ones until the manager has accepted one."""
        accepted = (await self.stats()).requests_total
        seconds = 0.5
        while (await self.stats()).requests_total == accepted:
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await self.generate_all(request, seconds)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            seconds *= 4

    async def stats(self) -> operator_pb.GetStatsResponse:
        return await self.operator.GetStats(operator_pb.GetStatsRequest(), timeout=120)

    async def stats_when(
        self, condition: Callable[[operator_pb.GetStatsResponse], bool], patience_s: float = 120.0
    ) -> operator_pb.GetStatsResponse:
        """Stats once they are so; waits so long for that."""
        end = time.monotonic() + patience_s
        while not condition(stats := await self.stats()):
            assert time.monotonic() < end, f"it did not come to that: {stats}"
            await asyncio.sleep(0.002)
        return stats

    async def until_serving(self, *, serving: bool = True) -> None:
        """Waits until the process says that it serves, or that it serves no more."""
        health, wanted = health_pb2_grpc.HealthStub(self.channel), SERVING if serving else NOT_SERVING
        end = time.monotonic() + 120
        while (await health.Check(health_pb2.HealthCheckRequest(), timeout=60)).status != wanted:
            assert time.monotonic() < end, "it does not serve" if serving else "it goes on serving"
            await asyncio.sleep(0.002)

    async def idle_stats(self, patience_s: float = 120.0) -> operator_pb.GetStatsResponse:
        """Stats once nothing runs or waits; waits so long for that."""
        return await self.stats_when(
            lambda stats: not (stats.running_sequences or stats.waiting_sequences or stats.active_blocks), patience_s
        )
