"""The engine as services see it. `pagekv.kvmanager.engine.loop.EngineLoop` implements it."""

from __future__ import annotations

from typing import Protocol

from pagekv.kvmanager.engine.queries import EngineQueries
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream


class Engine(Protocol):
    """Every method is called on the event loop that runs the engine loop, and none of them blocks."""

    @property
    def model(self) -> EngineInfo | None:
        """The served model; None until an executor is attached for the first time."""
        ...

    @property
    def queries(self) -> EngineQueries:
        """Everything beside requests: statistics, looks into the cache, pins, resets and watches."""
        ...

    def submit(self, command: GenerateCommand) -> RequestStream:
        """Queues a request. Raises AlreadyExists, Overloaded, Unavailable, InvalidRequest when it can never fit, or
        LimitExceeded when it cannot beside what is pinned.
        """
        ...

    def abort(self, request_id: str) -> bool:
        """Ends a request; its stream gets finish ABORT. False when it is not live. Its blocks are free at once."""
        ...

    def release(self, stream: RequestStream) -> None:
        """The reader has gone: what still runs of the stream's request ends as by `abort`, never another request that
        has its id by now. To be called for every stream: its ended sequences count as unread until then.
        """
        ...

    def finish_sequence(self, stream: RequestStream, index: int) -> None:
        """The reader found a stop string: ends one sequence quietly; nothing more is pushed for it."""
        ...
