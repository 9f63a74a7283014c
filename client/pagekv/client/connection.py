"""The connection of a client: its channel, its settings, and calls that are written once for the blocking and the
asyncio client.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, Self, TypeVar, Unpack, cast, overload

import grpc

from pagekv.client.channel import channel_options, target_or_default
from pagekv.client.errors import from_rpc_error
from pagekv.client.identity import FilePath, authorization, for_tenant, tls_files
from pagekv.client.options import with_options_of
from pagekv.client.outage import Pauses
from pagekv.client.renewed_channel import RenewedChannel
from pagekv.client.settings import CallOptions, CallSettings
from pagekv.client.wire import flat
from pagekv.common.errors import FailedPrecondition, InvalidRequest
from pagekv.v1 import cache_service_pb2_grpc, inference_service_pb2_grpc, operator_service_pb2_grpc

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from pagekv.client.aio import AsyncPageKVClient
    from pagekv.client.client import PageKVClient

P = ParamSpec("P")
Request = TypeVar("Request")
Answer = TypeVar("Answer")
Result = TypeVar("Result")
Values = TypeVar("Values", bound="DataclassInstance")
ResultOut = TypeVar("ResultOut", covariant=True)


class ClientMethod(Protocol[P, ResultOut]):
    """How type checkers see a method made by `for_both`."""

    @overload
    def __get__(self, client: PageKVClient, owner: Any = None) -> Callable[P, ResultOut]: ...
    @overload
    def __get__(self, client: AsyncPageKVClient, owner: Any = None) -> Callable[P, Coroutine[Any, Any, ResultOut]]: ...


def for_both(make: Callable[Concatenate[Any, P], Coroutine[Any, Any, Result]]) -> ClientMethod[P, Result]:
    """Makes a method from a coroutine function. The blocking client runs the coroutine at once, the asyncio client
    awaits it.
    """

    @wraps(make)
    def method(client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client._carry_out(make(client, *args, **kwargs))

    return cast("ClientMethod[P, Result]", method)


class Connection:
    """A channel to a manager. The subclass of each client says which library it uses and how it waits; the members for
    this are private to this package.
    """

    # grpc or grpc.aio.
    _library: ClassVar[ModuleType]
    # The event class of that library: threading.Event or asyncio.Event.
    _new_event: ClassVar[type[Any]]

    @with_options_of(CallOptions)
    def __init__(
        self,
        target: str | None = None,
        *,
        api_key: str | None = None,
        act_for: str | None = None,
        ca: FilePath | None = None,
        client_cert: FilePath | None = None,
        client_key: FilePath | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        channel: Any = None,
        **options: Unpack[CallOptions],
    ) -> None:
        """Connects only with the first call. Raises InvalidRequest, which names the argument, for one that is out of
        bounds.

        `target`: host:port or unix:/path; without one PAGEKV_TARGET, then 127.0.0.1:50051.
        `api_key`: 1 to 8,000 printable ASCII characters, sent with every call as "authorization: Bearer ..."; without
        one PAGEKV_API_KEY. To another machine only with TLS.
        `act_for`: the tenant whose calls these are, 1 to 64 characters of [A-Za-z0-9._-], for a caller that may name
        one; without it they are the caller's own.
        `ca`: for TLS, a PEM file of the authority that signed the manager's certificate; without one PAGEKV_CA. Files
        are read again when they change: later calls use the new content.
        `client_cert`, `client_key`: for TLS, PEM files of one's own certificate and its key, both or neither; without
        them PAGEKV_CLIENT_CERT and PAGEKV_CLIENT_KEY. Without `ca` and these nothing is encrypted, metadata included.
        `credentials`: TLS of one's own making instead, such as `grpc.ssl_channel_credentials()`.
        `channel`: an open channel of grpc (of grpc.aio for the asyncio client), perhaps with interceptors, to be used
        instead of one's own and not closed; `target` then only stands in messages.
        """
        self.target = target_or_default(target)
        arguments = signature(Connection.__init__).parameters.keys() - {"self", "options"}
        self._settings = CallSettings().changed(type(self).__name__, options, arguments)
        self._check_own(credentials, channel)
        beside = "channel" if channel is not None else "credentials" if credentials is not None else ""
        files = tls_files(ca=ca, client_cert=client_cert, client_key=client_key, beside=beside)
        encrypted = channel is not None or credentials is not None or files is not None
        entries = authorization(api_key, self._settings.metadata, self.target, encrypted=encrypted)
        entries = for_tenant(act_for, entries)
        self._settings = self._settings.changed(type(self).__name__, {"metadata": entries})
        self._loop = self._running_loop()
        self._owns_channel = channel is None
        # Shared with the clients that `with_options` gives.
        self._pauses = Pauses()
        if channel is None:
            channel = RenewedChannel(files, self._open_channel) if files else self._open_channel(credentials)
        self._channel = channel
        # At run time one stub class serves both kinds of channel.
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(channel)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(channel)
        self._operator = operator_service_pb2_grpc.OperatorServiceStub(channel)

    def _check_own(self, credentials: Any, channel: Any) -> None:
        """Raises InvalidRequest unless the caller's credentials or channel have the right type, and only one of them is
        given.
        """
        if credentials is not None and not isinstance(credentials, grpc.ChannelCredentials):
            raise InvalidRequest("credentials", f"must be grpc.ChannelCredentials, is {type(credentials).__name__}")
        if channel is not None and not isinstance(channel, self._library.Channel):
            raise InvalidRequest("channel", f"must be a {self._library.__name__}.Channel, is {type(channel)!r:.80}")
        if channel is not None and credentials is not None:
            raise InvalidRequest("credentials", "must be left out beside channel, which has its own")

    def _open_channel(self, credentials: grpc.ChannelCredentials | None) -> Any:
        limits = channel_options(self.target)
        if credentials is None:
            return self._library.insecure_channel(self.target, options=limits)
        return self._library.secure_channel(self.target, credentials, options=limits)

    def _channels(self) -> list[Any]:
        """The channels to close, after which none is opened."""
        return self._channel.shut() if isinstance(self._channel, RenewedChannel) else [self._channel]

    @with_options_of(CallOptions)
    def with_options(self, **options: Unpack[CallOptions]) -> Self:
        """The same connection with other settings for its calls. Closing it closes nothing.

        `client.with_options(timeout=2, metadata=[("traceparent", parent)]).stats()` changes the settings of one call.
        """
        other = copy.copy(self)
        other._settings = self._settings.changed("with_options", options)
        other._owns_channel = False
        return other

    def _running_loop(self) -> Any:
        """The running event loop, for a client that belongs to one. Raises FailedPrecondition if none is running."""
        raise NotImplementedError

    def _carry_out(self, steps: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    async def _wait_for(self, begun: Any) -> Any:
        """The result of a call that a stub has begun."""
        raise NotImplementedError

    def _messages(self, call: Any) -> AsyncIterator[Any]:
        """The messages of a stream."""
        raise NotImplementedError

    async def _pause(self, event: Any, seconds: float) -> None:
        """Returns when the event is set or the time is over."""
        raise NotImplementedError

    async def _rest(self, event: Any, seconds: float) -> None:
        """Returns when the event is set or the time is over. Closing the connection sets the event."""
        self._pauses.begin(event)
        try:
            await self._pause(event, seconds)
        finally:
            self._pauses.end(event)

    def _begin_call(self, method: Any, request: Any, timeout: float | None) -> Any:
        """A running call; for unary methods of the blocking client, the answer. Raises FailedPrecondition if the
        connection is closed, or belongs to another event loop.
        """
        if self._loop is not self._running_loop():
            problem = "an asyncio client must be used in the event loop where it was made: make one in each"
            raise FailedPrecondition(problem, "EVENT_LOOP", self.target)
        try:
            return method(request, timeout=timeout, metadata=self._settings.metadata)
        except (ValueError, grpc.aio.UsageError) as error:
            # Each of the two libraries raises one of these. A check beforehand would miss a thread that closes
            # meanwhile.
            if "closed" not in str(error):
                raise
            problem = f"the connection to PageKV at {self.target} was closed here: make another client"
            raise FailedPrecondition(problem, "CLIENT_CLOSED", self.target) from error

    async def _ask(self, method: grpc.UnaryUnaryMultiCallable[Request, Answer], request: Request) -> Answer:
        try:
            answer: Answer = await self._wait_for(self._begin_call(method, request, self._settings.timeout))
        except grpc.RpcError as error:
            raise from_rpc_error(error, self.target) from error
        return answer

    async def _ask_for(
        self, cls: type[Values], method: grpc.UnaryUnaryMultiCallable[Request, Any], request: Request
    ) -> Values:
        return flat(cls, await self._ask(method, request))
