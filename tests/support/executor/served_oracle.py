"""An oracle behind a real gRPC server in this process, whose steps wait where a test says so, and a client of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from pagekv.common.server import EPOCH_KEY, GrpcServer
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.executor.backend.interface import LAYOUT, BackendDescription, Sampled, Scheduled
from pagekv.executor.oracle.backend import OracleBackend, OracleModel
from pagekv.executor.rpc.service import SERVICE_NAME, ExecutorService
from pagekv.executor.session.session import Session
from pagekv.executor.session.worker_thread import WorkerThread
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

Code = grpc.StatusCode
Call = grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResult]
Detail = TypeVar("Detail", bound=Message)
MODEL = OracleModel(vocab_size=64, max_model_len=256)
# A sequence that would sample after this token fails.
FAILING = 63
PROMPT = list(range(10, 25))


class HeldOracle(OracleBackend):
    """An oracle whose steps wait while `gate` is cleared, and that notes what it is asked to do."""

    def __init__(self) -> None:
        super().__init__(MODEL, kv_bytes=12 * 16 * 200, max_sequences=8, failing=(FAILING,))
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.journal: list[str] = []
        self.described: list[int] = []

    def describe(self, block_size: int, token_budget: int) -> BackendDescription:
        self.described.append(block_size)
        return super().describe(block_size, token_budget)

    def allocate(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.journal.append(f"allocate {num_device_blocks}")
        super().allocate(block_size, num_device_blocks, num_host_blocks)

    def execute(self, scheduled: list[Scheduled]) -> dict[int, Sampled]:
        self.begun.set()
        assert self.gate.wait(120)
        self.journal.append("step")
        return super().execute(scheduled)


@dataclass
class Served:
    """A server, its backend, and a client of it."""

    backend: HeldOracle
    session: Session
    compute: WorkerThread
    stub: pb_grpc.ExecutorServiceAsyncStub
    channel: grpc.aio.Channel

    async def attach(self, manager_id: str = "a", **fields: Any) -> int:
        values = {"block_size": 4, "num_device_blocks": 50, "layout": LAYOUT, "contract_revision": 1, **fields}
        return (await self.stub.Attach(pb.AttachRequest(manager_id=manager_id, **values))).epoch

    def run(self, epoch: int | str | None = None) -> Call:
        """A Run call, which names this epoch in its metadata."""
        return self.stub.Run(metadata=None if epoch is None else ((EPOCH_KEY, str(epoch)),))


@asynccontextmanager
async def serving(loaded: bool = True) -> AsyncIterator[Served]:
    compute = WorkerThread()
    session = Session(compute)
    server = GrpcServer("127.0.0.1:0", [SERVICE_NAME], reflection=False)
    ExecutorService(session).add_to(server.server)
    port = await server.start()
    backend = HeldOracle()
    if loaded:
        session.serve(backend)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = cast("pb_grpc.ExecutorServiceAsyncStub", pb_grpc.ExecutorServiceStub(channel))
        try:
            yield Served(backend, session, compute, stub, channel)
        finally:
            backend.gate.set()
            await server.stop(0)
            compute.stop()


def served(test: Callable[[Served], Awaitable[None]], loaded: bool = True) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), serving(loaded) as it:
            await test(it)

    asyncio.run(main())


def entering(epoch: int, step: int = 1, seq_id: int = 1, first_block: int = 0) -> pb.StepRequest:
    """A sequence enters and computes its whole prompt; its blocks hold 24 positions."""
    return pb.StepRequest(
        epoch=epoch,
        step=step,
        new_seqs=[
            pb.NewSequence(
                seq_id=seq_id,
                token_ids=PROMPT,
                num_prompt_tokens=len(PROMPT),
                block_ids=range(first_block, first_block + 6),
                sampling=pb.StepSampling(top_p=1.0, repetition_penalty=1.0),
            )
        ],
        scheduled_seqs=[seq_id],
        scheduled_tokens=[len(PROMPT)],
    )


async def read(call: Call) -> pb.StepResult:
    result = await call.read()
    assert isinstance(result, pb.StepResult), "the stream ended"
    return result


async def end_of(call: Call) -> tuple[grpc.StatusCode, str]:
    """Status of a stream that ends by itself; results that come first are dropped."""

    async def drain() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    error = await refusal(drain())
    return error.code(), error.details() or ""


async def refusal(answer: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value


def detail_of(error: grpc.aio.AioRpcError, kind: type[Detail]) -> Detail:
    """The detail of google.rpc of this kind that an error carries."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(cast("bytes", trailers[STATUS_DETAILS_KEY]))
    found = kind()
    assert any(detail.Unpack(found) for detail in status.details)
    return found


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The field that a refusal names."""
    return str(detail_of(error, error_details_pb2.BadRequest).field_violations[0].field)


def rule_of(error: grpc.aio.AioRpcError) -> str:
    """The rule of a step that a refusal names."""
    return str(detail_of(error, error_details_pb2.ErrorInfo).metadata["rule"])


def unmet(error: grpc.aio.AioRpcError) -> str:
    """Kind and subject of the precondition that a refusal names."""
    (violation,) = detail_of(error, error_details_pb2.PreconditionFailure).violations
    return f"{violation.type} {violation.subject}"
