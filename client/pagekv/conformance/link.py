"""The connection to the executor under test: its calls, and refusals with the field and rule that they name."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagekv.common.keepalive import keepalive_options
from pagekv.common.message_sizes import MAX_RESULT_BYTES
from pagekv.common.statuses import STATUS_DETAILS_KEY
from pagekv.conformance.verdict import BrokenRule
from pagekv.steps.v1 import executor_service_pb2 as pb
from pagekv.steps.v1 import executor_service_pb2_grpc as pb_grpc

# Seconds to find the executor; for Describe and Attach, which may profile and allocate; for the result of a step, the
# first of which may compile.
CONNECT_S = 2.0
CALL_S = 300.0
RESULT_S = 120.0
# As managers ping (P10).
KEEPALIVE_MS = 10_000

T = TypeVar("T")


class Refusal(Exception):
    """A call that ended with an error: its status, and of its details the field (BadRequest) and the rule (ErrorInfo),
    empty where none is named.
    """

    def __init__(self, error: grpc.RpcError) -> None:
        call: Any = error  # every RpcError of a client is its call
        self.code: grpc.StatusCode = call.code()
        self.words = str(call.details() or "")
        self.field = self.rule = ""
        trailers = dict(call.trailing_metadata() or ())
        try:
            status = status_pb2.Status.FromString(trailers.get(STATUS_DETAILS_KEY, b""))
        except Exception:  # whatever stands there, it names no field
            status = status_pb2.Status()
        for detail in status.details:
            request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
            if detail.Unpack(request) and request.field_violations:
                self.field = request.field_violations[0].field
            elif detail.Unpack(info):
                self.rule = info.metadata.get("rule", "")
        super().__init__(str(self))

    def __str__(self) -> str:
        named = f", field {self.field}" if self.field else ""
        return f"{self.code.name}{named} ({self.words[:200]})"


class StepsCall:
    """A Run stream, which may name an epoch in its metadata. A thread reads it, so that every wait has an end."""

    def __init__(self, stub: pb_grpc.ExecutorServiceStub, epoch: int | None = None) -> None:
        self._outgoing: queue.SimpleQueue[pb.StepRequest | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[pb.StepResult | Refusal | None] = queue.SimpleQueue()
        metadata = None if epoch is None else (("pagekv-epoch", str(epoch)),)
        self._call = stub.Run(iter(self._outgoing.get, None), metadata=metadata)
        threading.Thread(target=self._read, name="results", daemon=True).start()

    def _read(self) -> None:
        try:
            for result in self._call:
                self._incoming.put(result)
            self._incoming.put(None)
        except grpc.RpcError as error:
            self._incoming.put(Refusal(error))

    def send(self, request: pb.StepRequest) -> None:
        """Sends a step; does not wait."""
        self._outgoing.put(request)

    def half_close(self) -> None:
        """Says that no more steps will come."""
        self._outgoing.put(None)

    def outcome(self) -> pb.StepResult | Refusal | None:
        """The next result or the error that ended the stream, None for OK. Raises BrokenRule if nothing comes."""
        try:
            return self._incoming.get(timeout=RESULT_S)
        except queue.Empty:
            raise BrokenRule(f"no answer within {RESULT_S:.0f} s") from None

    def result(self) -> pb.StepResult:
        """The next result. Raises BrokenRule where the stream has ended instead."""
        outcome = self.outcome()
        if isinstance(outcome, pb.StepResult):
            return outcome
        raise BrokenRule(f"the stream ended with {outcome or 'OK'} instead of a result")

    def refusal(self) -> Refusal:
        """The error that ends the stream now. Raises BrokenRule where there is none."""
        outcome = self.outcome()
        if isinstance(outcome, Refusal):
            return outcome
        if outcome is None:
            raise BrokenRule("the stream ended with OK instead of an error")
        raise BrokenRule(f"step {outcome.step} was accepted")

    def close(self) -> None:
        """Ends the call, whatever its state."""
        self._outgoing.put(None)
        self._call.cancel()


def open_channel(target: str, keepalive_ms: int = KEEPALIVE_MS) -> grpc.Channel:
    """A channel as a manager has it."""
    return grpc.insecure_channel(
        target,
        options=[
            # A proxy configured for the internet does not lead to an executor.
            ("grpc.enable_http_proxy", 0),
            # A connection of its own, though another channel leads to the same address.
            ("grpc.use_local_subchannel_pool", 1),
            # P13.
            ("grpc.max_receive_message_length", MAX_RESULT_BYTES),
            *keepalive_options(keepalive_ms, idle=True),
        ],
    )


class Link:
    """One channel to the executor and the three calls of its service. Calls raise Refusal."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel = open_channel(target)
        self._stub = pb_grpc.ExecutorServiceStub(self._channel)

    def is_there(self) -> bool:
        """Whether a server answers at the address, within CONNECT_S seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=CONNECT_S)
        except grpc.FutureTimeoutError:
            return False
        return True

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        return _call(self._stub.Describe, request)

    def attach(self, request: pb.AttachRequest) -> int:
        return int(_call(self._stub.Attach, request).epoch)

    def run(self, epoch: int | None = None) -> StepsCall:
        return StepsCall(self._stub, epoch)

    def close(self) -> None:
        self._channel.close()


def _call(method: Callable[..., T], request: object) -> T:
    try:
        return method(request, timeout=CALL_S)
    except grpc.RpcError as error:
        raise Refusal(error) from error
