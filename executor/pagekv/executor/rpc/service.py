"""ExecutorService over a `Session`: translates messages and makes no decisions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagekv.common.errors import InvalidRequest, PageKVError
from pagekv.common.large_messages import SMALL_BYTES
from pagekv.common.logs import Log
from pagekv.common.server import EPOCH_KEY
from pagekv.executor.rpc import wire
from pagekv.executor.session.session import Session, StepFailed
from pagekv.executor.session.step_stream import StepStream
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

log = Log(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name


class ExecutorService(pb_grpc.ExecutorServiceServicer):
    """The servicer. The comments in executor_service.proto are the contract of each call. Errors are raised as
    `PageKVError`, and the server's interceptor turns them into statuses.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_ExecutorServiceServicer_to_server(self, server)

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return wire.describe_response(
            await self._session.describe(request.block_size, request.token_budget, request.contract_revision)
        )

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        epoch = await self._session.attach(wire.attach_order(request))
        graphs = self._session.graphs
        return pb.AttachResponse(epoch=epoch, graphs=graphs.recorded, failed_graphs=graphs.failed)

    async def Run(  # type: ignore[override]  # the server's interceptor hands on the bytes of several requests
        self, request_iterator: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[pb.StepResult]:
        stream = self._session.open_stream(_named_epoch(context.invocation_metadata()))
        # If the client goes away while a result is being written, the `finally` below runs late.
        context.add_done_callback(lambda _: self._session.close_stream(stream))
        reader = asyncio.create_task(self._read(request_iterator, stream), name="steps")
        try:
            async for report in stream.reports():
                yield wire.step_result(report)
        finally:
            # Before the call ends, because the reader would report that as an error.
            reader.cancel()
            self._session.close_stream(stream)

    async def _read(self, requests: AsyncIterator[bytes], stream: StepStream) -> None:
        """Reads and submits steps until the client sends no more. An error ends the stream."""
        session = self._session
        try:
            async for data in requests:
                if len(data) <= SMALL_BYTES:
                    step = wire.step(data)
                else:
                    await asyncio.sleep(0)  # this turn of the event loop has copied the message
                    request = await wire.read_step(
                        data, session.limits, lambda epoch: session.check_epoch(stream, epoch)
                    )
                    step = await wire.large_step(request, data)
                await session.submit(stream, step)
            session.finish_input(stream)
        except DecodeError as error:
            refusal = InvalidRequest("step", f"must be a StepRequest, but its bytes cannot be read: {error}")
            session.finish_input(stream, refusal)
        except PageKVError as error:
            if stream.epoch is None and not isinstance(error, InvalidRequest):
                stream.deliver(error)
            else:
                session.finish_input(stream, error)
        except Exception as error:
            log.exception("cannot read steps")
            stream.deliver(StepFailed(f"steps cannot be read: {type(error).__name__}: {error}"))


def _named_epoch(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """The epoch in a Run call's metadata (P3); None if there is none. Raises InvalidRequest."""
    for key, value in metadata or ():
        if key == EPOCH_KEY:
            # A uint64 has at most 20 digits.
            if not re.fullmatch(r"[0-9]{1,20}", str(value)):
                raise InvalidRequest(EPOCH_KEY, f"must be an epoch in 1 to 20 decimal digits, got {str(value)[:64]!r}")
            return int(value)
    return None
