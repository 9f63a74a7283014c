"""A fake manager for client tests: it plays a script of expected calls and fails the test on what was left over.

`server.expect("Tokenize", reply, check=...)` adds one call to the script; calls are answered in that order and none
may come that the script does not have. `Fails` in a reply ends the call with a status.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clients.held_port import hold
from support.waiting import wait_until

from pagekv.common.errors import PageKVError
from pagekv.common.statuses import STATUS_DETAILS_KEY, status_proto, status_row
from pagekv.v1 import cache_service_pb2_grpc, inference_service_pb2_grpc, operator_service_pb2_grpc, types_pb2
from pagekv.v1 import inference_service_pb2 as pb

LOST = grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class Fails:
    """Ends a call: with a PageKVError as the real server would, or with a bare status as a lost connection does."""

    error: PageKVError | grpc.StatusCode


class Hangs:
    """Keeps the call open until its client ends it; its method then stands in the script's `cancelled` list."""


@dataclass
class _Step:
    method: str
    replies: list[Any]
    check: Callable[[Any], None] | None


@dataclass
class ScriptedServer:
    """Listens on a free loopback port from `start` to `stop`; may be started again on the same port."""

    port: int = 0
    steps: deque[_Step] = field(default_factory=deque)
    # Failures inside handlers, where an assertion would only reach the client as a status.
    problems: list[str] = field(default_factory=list)
    # Methods of calls with `Hangs` in their script that are over.
    cancelled: list[str] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    # Of each call, without gRPC's own entries.
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    # For encrypted connections alone, where there are some.
    credentials: grpc.ServerCredentials | None = None
    # From the first start to the last stop, so that no other process is given the port in between.
    _held: socket.socket | None = None
    _server: grpc.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def expect(self, method: str, *replies: Any, check: Callable[[Any], None] | None = None) -> None:
        """The next call is `method`, answered by `replies` (messages, Fails, Hangs) after `check(request)`."""
        self.steps.append(_Step(method, list(replies), check))

    def start(self) -> None:
        server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        servicer: Any = _Servicer(self)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
        cache_service_pb2_grpc.add_CacheServiceServicer_to_server(servicer, server)
        operator_service_pb2_grpc.add_OperatorServiceServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        if not self.port:
            self._held = hold()
            self.port = self._held.getsockname()[1]
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, self.credentials)
        server.start()
        self._server = server

    def wait_cancelled(self, method: str) -> None:
        """Waits until a call of this method that hung is over."""
        wait_until(lambda: method in self.cancelled)
        assert self.cancelled == [method]

    def stop(self) -> None:
        """Drops every connection at once, as a killed process does."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def finish(self) -> None:
        """Stops and fails unless the script was played to its end without a problem."""
        self.stop()
        if self._held is not None:
            self._held.close()
        assert not self.problems, self.problems
        assert not self.steps, f"calls that never came: {[step.method for step in self.steps]}"

    def play(self, method: str, request: Message, context: grpc.ServicerContext) -> Iterator[Any]:
        self.deadlines.append(context.time_remaining())
        self.metadata.append({key: value for key, value in context.invocation_metadata() if key != "user-agent"})
        if not self.steps or self.steps[0].method != method:
            self.problems.append(f"unexpected {method}({request})")
            context.abort(grpc.StatusCode.INTERNAL, "not in the script")
        step = self.steps.popleft()
        if step.check is not None:
            try:
                step.check(request)
            except AssertionError as error:
                self.problems.append(f"{method}: {error}")
        gone = threading.Event()
        if any(isinstance(reply, Hangs) for reply in step.replies):
            # From the start: a client that leaves early ends the call before its replies have been taken.
            def over() -> None:
                self.cancelled.append(method)
                gone.set()

            if not context.add_callback(over):
                over()
        for reply in step.replies:
            if isinstance(reply, Fails):
                _abort(context, reply.error)
            elif isinstance(reply, Hangs):
                gone.wait(120)
                return
            elif callable(reply):
                reply()
            else:
                yield reply


def _abort(context: grpc.ServicerContext, error: PageKVError | grpc.StatusCode) -> None:
    if isinstance(error, grpc.StatusCode):
        context.abort(error, "Socket closed")
    status = status_proto(error)
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, status.SerializeToString()),))
    context.abort(status_row(error).code, status.message)


class _Servicer:
    """Every method of the services plays the script."""

    def __init__(self, script: ScriptedServer) -> None:
        self._script = script

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        return self._script.play("Generate", request, context)

    def WatchEvents(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        return self._script.play("WatchEvents", request, context)

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        return self._script.play("Watch", request, context)

    def Check(self, request: Any, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        (reply,) = self._script.play("Check", request, context)
        return reply

    def __getattr__(self, method: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def unary(request: Any, context: grpc.ServicerContext) -> Any:
            replies = list(self._script.play(method, request, context))
            return replies[0] if replies else None

        if method[:1].isupper():
            return unary
        raise AttributeError(method)


MODEL = "f00d"


def chunk(
    *token_ids: int, text: str | None = None, index: int = 0, prompt: int = 3, cached: int = 0, done: int = 0
) -> Any:
    """A GenerateResponse with a chunk; the text of token 7 is "t7 " unless given; `done` tokens came before."""
    return pb.GenerateResponse(
        request_id="req",
        # The real server says it in the first message of a call.
        model_fingerprint="" if done else MODEL,
        chunk=pb.GenerateChunk(
            index=index,
            token_ids=token_ids,
            text="".join(f"t{token_id} " for token_id in token_ids) if text is None else text,
            prompt_tokens=prompt,
            completion_tokens=done + len(token_ids),
            cached_tokens=cached,
        ),
    )


def complete(
    *token_ids: int,
    text: str | None = None,
    index: int = 0,
    prompt: int = 3,
    cached: int = 0,
    resumed: int = 0,
    **more: Any,
) -> Any:
    """A GenerateResponse with the end of a sequence by length; `resumed` tokens were left out of `token_ids`."""
    return pb.GenerateResponse(
        request_id="req",
        complete=pb.GenerateComplete(
            index=index,
            finish_reason=more.pop("reason", types_pb2.FINISH_REASON_LENGTH),
            token_ids=token_ids,
            text="".join(f"t{token_id} " for token_id in token_ids) if text is None else text,
            prompt_tokens=prompt,
            completion_tokens=resumed + len(token_ids),
            cached_tokens=cached,
            **more,
        ),
    )


def answer(*token_ids: int, **more: Any) -> tuple[Any, Any]:
    """A whole answer, as the real server streams it: a chunk with everything, and the end."""
    same = {name: more[name] for name in ("text", "index", "prompt", "cached") if name in more}
    return chunk(*token_ids, done=more.get("resumed", 0), **same), complete(*token_ids, **more)
