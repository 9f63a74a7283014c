"""gRPC calls made at random: any method of a port, mostly as its clients call it, and all the other ways in which a
call can begin, end or stay.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2
from support.fuzz.messages import encoded

from pagekv.common.server import EPOCH_KEY
from pagekv.steps.v1 import executor_service_pb2
from pagekv.v1 import cache_service_pb2, inference_service_pb2, operator_service_pb2

OWN = (health_pb2, reflection_pb2)
MANAGER_FILES = (inference_service_pb2, cache_service_pb2, operator_service_pb2, vllm_engine_pb2, *OWN)
EXECUTOR_FILES = (executor_service_pb2, *OWN)
# Statuses that answer a call of a port that serves. DEADLINE_EXCEEDED and CANCELLED are right only where the caller has
# set a deadline or has gone; UNKNOWN, INTERNAL, UNAVAILABLE, DATA_LOSS and those of logins never are.
ANSWERS = frozenset(
    (
        *(StatusCode.OK, StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.ALREADY_EXISTS),
        *(StatusCode.RESOURCE_EXHAUSTED, StatusCode.FAILED_PRECONDITION, StatusCode.ABORTED),
        *(StatusCode.OUT_OF_RANGE, StatusCode.UNIMPLEMENTED),
    )
)
# Seconds after which a call that has no other deadline counts as one that hangs.
HANG_S = 240.0
# Seconds for which answers without an end are read.
PATIENCE_S = (0.005, 0.02, 0.2)
# Calls that wait for something before they answer, by their own field. Calls without a message may wait, too, if their
# callers leave them open.
WAITING = frozenset(("FlushCache",))
# gRPC's client, of a call that has ended while it was still writing: the status that came is lost in the client.
ENDED_BEFORE_ALL_WAS_SENT = "Internal error from Core"
CONNECTION = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
# Values of `pagekv-epoch`: of epochs that never were, and malformed.
EPOCHS = ("0", "1", "007", str(2**64 - 1), "9" * 20, "9" * 21, "-1", "1.0", "", " 1", "x" * 5000)
# Fields that are never set: an Attach that takes over ends the epoch of the manager, whose executor this is, as it may.
FORBIDDEN = frozenset(("take_over",))


@dataclass(frozen=True)
class Call:
    """One call: all that is sent, and how it ends."""

    method: str
    messages: tuple[bytes, ...]
    # Sent as a stream, whatever the method takes.
    streamed: bool = False
    answers_stream: bool = False
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    # Seconds; None: HANG_S.
    deadline_s: float | None = None
    # Messages of the answer that are read before the caller goes away; None: all of them.
    reads: int | None = None
    # The caller does not say that its messages are all.
    half_open: bool = False
    compressed: bool = False
    waits: bool = False
    # Seconds for which an answer without an end is read.
    patience_s: float = 1.0

    @property
    def size(self) -> int:
        """Bytes that are sent at most."""
        return sum(map(len, self.messages))

    @property
    def count(self) -> int:
        """Messages."""
        return len(self.messages)


@dataclass
class Methods:
    """The methods of a port, drawn with weights."""

    descriptors: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, files: Iterable[Any]) -> Methods:
        found = cls()
        for file in files:
            for service in file.DESCRIPTOR.services_by_name.values():
                for method in service.methods:
                    found.descriptors.append(method)
                    found.weights.append(5.0 if method.name == "Generate" else 1.0)
        return found

    def draw(self, rng: random.Random) -> Any:
        return rng.choices(self.descriptors, self.weights)[0]


def make_call(rng: random.Random, methods: Methods) -> Call:
    """The call that these random numbers mean."""
    method = methods.draw(rng)
    count = rng.choice([1, 1, 2, 5]) if method.client_streaming else 1
    streamed = method.client_streaming
    if rng.random() < 0.03:
        streamed, count = True, rng.choice([0, 1, 2])
    # Now and then the message of another method.
    described = method if rng.random() < 0.98 else methods.draw(rng)
    messages = tuple(encoded(rng, described.input_type, forbidden=FORBIDDEN) for _ in range(count))
    name = method.name if rng.random() < 0.995 else rng.choice(["", "Nothing", "x" * 2000])
    fate = rng.random()
    return Call(
        f"/{method.containing_service.full_name}/{name}",
        messages,
        streamed=streamed,
        answers_stream=method.server_streaming,
        metadata=_metadata(rng),
        deadline_s=rng.choice([0.0, 0.001, 0.02, 0.2]) if fate < 0.06 else None,
        reads=rng.choice([0, 0, 1, 2]) if 0.06 <= fate < 0.14 else None,
        half_open=streamed and rng.random() < 0.1,
        compressed=rng.random() < 0.02,
        waits=method.name in WAITING or not messages,
        patience_s=rng.choice(PATIENCE_S),
    )


def _metadata(rng: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    if rng.random() < 0.9:
        return ()
    trace, span = rng.randbytes(16).hex(), rng.randbytes(8).hex()
    return rng.choice(
        (
            (("traceparent", f"00-{trace}-{span}-01"),),
            (
                (
                    "traceparent",
                    rng.choice(["", "00", f"ff-{trace}-{span}-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-00"]),
                ),
            ),
            (("x", "y" * rng.choice([1, 7000, 20_000])),),
            tuple((f"x-{n}", "y") for n in range(200)),
            (("x-bin", rng.randbytes(100)), ("grpc-trace-bin", rng.randbytes(30))),
            # Epochs that are over, or none; the right one is named by the steps of `support.fuzz.steps`.
            tuple((EPOCH_KEY, rng.choice(EPOCHS)) for _ in range(rng.choice([1, 1, 2]))),
        )
    )


async def perform(channel: grpc.aio.Channel, call: Call) -> str:
    """Makes the call. "" when it ended as it may, else what is wrong with its end."""
    code, details = await _outcome(channel, call)
    if code is StatusCode.INTERNAL and details == ENDED_BEFORE_ALL_WAS_SENT:
        return ""
    allowed = set(ANSWERS)
    if call.deadline_s is not None or call.waits:
        allowed.add(StatusCode.DEADLINE_EXCEEDED)
    if call.reads is not None or call.half_open or call.answers_stream:
        # By this client.
        allowed.add(StatusCode.CANCELLED)
    return "" if code in allowed else f"{code.name}: {details}"


async def _outcome(channel: Any, call: Call) -> tuple[StatusCode, str]:
    timeout = call.deadline_s if call.deadline_s is not None else (call.patience_s if call.waits else HANG_S)
    compression = grpc.Compression.Gzip if call.compressed else None
    options: dict[str, Any] = {"timeout": timeout, "metadata": call.metadata, "compression": compression}
    if call.streamed:
        going = channel.stream_stream(call.method)(**options)
    elif call.answers_stream or call.reads is not None:
        going = channel.unary_stream(call.method)(call.messages[0], **options)
    else:
        going = channel.unary_unary(call.method)(call.messages[0], **options)
        return await going.code(), await going.details()
    left = call.reads if call.reads is not None else -1
    try:
        async with asyncio.timeout(call.patience_s if call.answers_stream or call.half_open else None):
            if call.streamed:
                for message in call.messages:
                    await going.write(message)
                if not call.half_open:
                    await going.done_writing()
            while left and await going.read() is not grpc.aio.EOF:
                left -= 1
        if not left:
            going.cancel()
    except TimeoutError:
        going.cancel()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        # The call has ended: its status says how.
        pass
    return await going.code(), await going.details()


def shown(call: Call) -> str:
    """All of a call, for a failure's report: enough to make it again."""
    sent = ", ".join(
        message.hex() if len(message) <= 4096 else f"{message[:4096].hex()}... of {len(message)} bytes"
        for message in call.messages
    )
    rest = {
        name: value
        for name, value in vars(call).items()
        if name not in ("method", "messages") and value not in (False, None, ())
    }
    return f"{call.method} {rest} [{sent}]"
