"""The requests that have not ended, by tenant and id, and the ended sequences that are unread. No scheduling."""

from __future__ import annotations

import asyncio
import time

from pagekv.kvmanager.request.command import GenerateCommand
from pagekv.kvmanager.request.stream import RequestStream
from pagekv.kvmanager.request.tenant_counts import TenantCounts
from pagekv.kvmanager.request.wakeups import Wakeups
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus, live_request


class LiveRequests:
    """Holds a request from `add` until all of its sequences have finished. Used by the engine loop alone."""

    def __init__(self, priority_aging: int) -> None:
        """`priority_aging` as in `live_request`."""
        self._priority_aging = priority_aging
        self._wakeups = Wakeups()
        # By id and then by tenant.
        self._requests: dict[str, dict[str, LiveRequest]] = {}
        self._by_stream: dict[RequestStream, LiveRequest] = {}
        self._arrivals = 0
        # By stream that its reader has not released: the tenant, and how many of the stream's sequences have ended.
        self._being_read: dict[RequestStream, tuple[str, int]] = {}
        # The sum of these, by tenant: ended sequences whose readers have not taken them.
        self.num_unread: TenantCounts[str] = TenantCounts()
        # Streams that are not released, by tenant.
        self._readers: TenantCounts[str] = TenantCounts()
        # Requests of each tenant.
        self._tenants: TenantCounts[str] = TenantCounts()
        # Set while no request is live.
        self.idle = asyncio.Event()
        self.idle.set()

    def __len__(self) -> int:
        return len(self._by_stream)

    def all(self) -> list[LiveRequest]:
        """All requests by arrival, in a new list: requests may end while the caller goes through it."""
        return list(self._by_stream.values())

    def add(self, command: GenerateCommand, root: bytes, prepared: PreparedPrompt | None = None) -> LiveRequest:
        """Adds a request whose id is free; `root`: the parent digest of its first block; `prepared`: its prompt."""
        stream = RequestStream(command.request_id, command.n, self._wakeups)
        request = live_request(command, stream, self._arrivals, root, self._priority_aging, prepared)
        request.created = time.time()
        self._arrivals += 1
        self._by_stream[stream] = request
        self._requests.setdefault(command.request_id, {})[command.tenant.name] = request
        self._being_read[stream] = command.tenant.name, 0
        self._readers.add(command.tenant.name, 1)
        self._tenants.add(command.tenant.name, 1)
        self.idle.clear()
        return request

    def get(self, request_id: str, tenant: str = "") -> LiveRequest | None:
        return self._requests.get(request_id, {}).get(tenant)

    def named(self, request_id: str) -> list[LiveRequest]:
        """The live requests of this id, of all tenants."""
        return list(self._requests.get(request_id, {}).values())

    def of(self, stream: RequestStream) -> LiveRequest | None:
        """The live request of this stream; never another request that has the same id by now."""
        return self._by_stream.get(stream)

    def release(self, stream: RequestStream) -> LiveRequest | None:
        """The reader has gone: nothing of the stream is unread any more. Returns the request if live. Idempotent."""
        if stream in self._being_read:
            tenant, ended = self._being_read.pop(stream)
            self.num_unread.add(tenant, -ended)
            self._readers.add(tenant, -1)
        return self.of(stream)

    def remove_if_finished(self, request: LiveRequest) -> bool:
        """Removes a request whose sequences have all finished, and counts ended sequences as unread. Must be called
        whenever a sequence has finished. Returns True if this call removed the request.
        """
        if self._by_stream.get(request.stream) is not request:
            return False
        finished = [sequence.state is SeqStatus.FINISHED for sequence in request.sequences]
        tenant = request.command.tenant.name
        if request.stream in self._being_read:
            # A beam search has nothing to read before its end.
            ended = request.command.n if all(finished) else 0 if request.search is not None else sum(finished)
            self.num_unread.add(tenant, ended - self._being_read[request.stream][1])
            self._being_read[request.stream] = tenant, ended
        if not all(finished):
            return False
        del self._by_stream[request.stream]
        of_id = self._requests[request.command.request_id]
        del of_id[tenant]
        if not of_id:
            del self._requests[request.command.request_id]
        self._tenants.add(tenant, -1)
        if not self._by_stream:
            self.idle.set()
        return True

    def num_tenants(self, also: str) -> int:
        """Number of tenants that have live requests, including the tenant `also`."""
        return self._tenants.num_tenants(also)

    def num_reading(self, also: str) -> int:
        """Number of tenants that have requests which are live or unread, including the tenant `also`."""
        return self._readers.num_tenants(also)
