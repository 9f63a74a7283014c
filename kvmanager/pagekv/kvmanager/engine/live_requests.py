"""The requests that have not ended, by id: how each enters, is found by its reader, and is forgotten. No scheduling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.request.wakeups import Wakeups
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq, SeqStatus, live_request


class LiveRequests:
    """A request is in here from `enter` until every sequence of it has finished. Used by the engine loop alone."""

    def __init__(self, priority_aging: int) -> None:
        """`priority_aging` as `live_request` takes it."""
        self._priority_aging = priority_aging
        self._wakeups = Wakeups()
        self._requests: dict[str, LiveRequest] = {}
        self._arrivals = 0
        # Of every request whose reader has not left: its sequences that have ended.
        self._being_read: dict[RequestStream, int] = {}
        # All of these.
        self.num_unread = 0
        # Set while there is none.
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def all(self) -> list[LiveRequest]:
        """In the order they came; a list of its own, so that they may be closed on the way."""
        return list(self._requests.values())

    def commands(self) -> Iterable[GenerateCommand]:
        """What was asked for by each."""
        return (request.command for request in self._requests.values())

    def sequences(self) -> Iterable[Seq]:
        """Every sequence of every request, finished ones included."""
        return (sequence for request in self._requests.values() for sequence in request.sequences)

    def enter(self, command: GenerateCommand, root: bytes) -> LiveRequest:
        """A request whose id is free; `root` is the parent digest of its first block."""
        stream = RequestStream(command.request_id, command.n, self._wakeups)
        request = live_request(command, stream, self._arrivals, root, self._priority_aging)
        self._arrivals += 1
        self._requests[command.request_id] = request
        self._being_read[stream] = 0
        self.idle.clear()
        return request

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request of this id."""
        return self._requests.get(request_id)

    def of(self, stream: RequestStream) -> LiveRequest | None:
        """The live request that this reader reads; never another one that has its id by now."""
        request = self._requests.get(stream.request_id)
        return request if request is not None and request.stream is stream else None

    def leave(self, stream: RequestStream) -> LiveRequest | None:
        """Its reader has left. The request, where that is still live. Idempotent."""
        self.num_unread -= self._being_read.pop(stream, 0)
        return self.of(stream)

    def forget_if_done(self, request: LiveRequest) -> bool:
        """To be called whenever a sequence of it has finished. True when that was the last, and for the first time."""
        if self._requests.get(request.command.request_id) is not request:
            return False
        finished = [sequence.state is SeqStatus.FINISHED for sequence in request.sequences]
        if request.stream in self._being_read:
            # Of a beam search there is nothing to read before its end.
            ended = request.command.n if all(finished) else 0 if request.search is not None else sum(finished)
            self.num_unread += ended - self._being_read[request.stream]
            self._being_read[request.stream] = ended
        if not all(finished):
            return False
        del self._requests[request.command.request_id]
        if not self._requests:
            self.idle.set()
        return True
