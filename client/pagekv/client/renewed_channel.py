"""A channel over TLS that follows its files, so that a client outlives its certificate and its authority."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import grpc

from pagekv.client.identity import TlsFiles
from pagekv.common.errors import InvalidRequest

log = logging.getLogger(__name__)

# Seconds until files that cannot be used are read again. A certificate and its key are not replaced at one moment.
RETRY_S = 1.0


class RenewedChannel:
    """Stands for a channel of grpc or grpc.aio. A call begins on a channel with the files as they are then, because
    gRPC reads them only once. Calls under way end on the channel on which they began.

    States: open → shut.
    """

    def __init__(self, files: TlsFiles, open_channel: Callable[[grpc.ChannelCredentials], Any]) -> None:
        self._files, self._open_channel = files, open_channel
        self._lock = threading.Lock()
        self._is_shut = False
        # After files that could not be used: when they are read again, and why.
        self._retry_at, self._problem = 0.0, ""
        self._latest: Any = open_channel(files.credentials())
        # The latest, and earlier ones while a call holds them: one in this list, or one that blocks in `call`.
        self._open: WeakSet[Any] = WeakSet([self._latest])
        self._calls: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def unary_unary(self, *args: Any, _registered_method: bool = False, **kwargs: Any) -> Callable[..., Any]:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, _registered_method: bool = False, **kwargs: Any) -> Callable[..., Any]:
        return self._method("unary_stream", args, kwargs)

    def _method(self, kind: str, args: Any, kwargs: Any) -> Callable[..., Any]:
        def call(request: Any, **options: Any) -> Any:
            channel = self._renewed()
            # Not as a registered method, with which gRPC crashes if the channel is closed meanwhile.
            begun = getattr(channel, kind)(*args, **kwargs)(request, **options)
            if isinstance(begun, (grpc.Call, grpc.aio.Call)):
                self._calls[begun] = channel
            return begun

        return call

    def _renewed(self) -> Any:
        """The channel for a new call."""
        if not self._files.have_changed or time.monotonic() < self._retry_at:
            return self._latest
        with self._lock:
            if not self._is_shut and self._files.have_changed:
                try:
                    self._latest = self._open_channel(self._files.credentials())
                    self._open.add(self._latest)
                    self._problem = ""
                except InvalidRequest as error:
                    self._retry_at = time.monotonic() + RETRY_S
                    if str(error) != self._problem:
                        words = "files of TLS have changed and cannot be used; the earlier content is used: %s"
                        log.warning(words, error)
                    self._problem = str(error)
            return self._latest

    def shut(self) -> list[Any]:
        """The channels that are open, for the caller to close; no other is opened afterwards. Idempotent."""
        with self._lock:
            self._is_shut = True
            return list(self._open)
