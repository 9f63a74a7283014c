"""Caps: how much a tenant's requests may hold at once."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq


class Cap(NamedTuple):
    """Bounds of a tenant's running requests: how many, and how many blocks they may come to need. None: no bound."""

    requests: int | None = None
    blocks: int | None = None


class RunningRequests:
    """Number of requests in the running order by tenant, and blocks that they may come to need together."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # By request: its sequences in the order, and blocks that it may come to need.
        self._sequences: Counter[LiveRequest] = Counter()
        self._needs: dict[LiveRequest, int] = {}
        # By tenant, without zeros.
        self._requests: Counter[int] = Counter()
        self._blocks: Counter[int] = Counter()

    def add(self, sequence: Seq) -> None:
        """Counts a sequence that enters the running order."""
        request = sequence.request
        self._sequences[request] += 1
        if request not in self._needs:
            self._needs[request] = needed = _most_blocks(request, self._block_size)
            self._requests[request.tenant] += 1
            self._blocks[request.tenant] += needed

    def remove(self, sequence: Seq) -> None:
        """Counts a sequence that leaves the running order."""
        request = sequence.request
        self._sequences[request] -= 1
        if self._sequences[request]:
            return
        del self._sequences[request]
        self._requests[request.tenant] -= 1
        self._blocks[request.tenant] -= self._needs.pop(request)
        if not self._requests[request.tenant]:
            del self._requests[request.tenant], self._blocks[request.tenant]

    def count(self, tenant: int) -> int:
        return self._requests[tenant]

    def are_above(self, cap: Cap, head: LiveRequest) -> bool:
        """Whether the running requests of a tenant would exceed its cap with its next request `head`. A request that
        runs already never exceeds it, and a tenant's only request never does by its blocks.
        """
        if head in self._needs:
            return False
        requests, blocks = self._requests[head.tenant], self._blocks[head.tenant]
        if cap.requests is not None and requests >= cap.requests:
            return True
        return cap.blocks is not None and requests > 0 and blocks + _most_blocks(head, self._block_size) > cap.blocks


def _most_blocks(request: LiveRequest, block_size: int) -> int:
    """Blocks that a request may come to need if its sequences share none."""
    each = [-(-(sequence.max_total - 1) // block_size) for sequence in request.sequences]
    return max(sum(each), max(each, default=0) * request.command.sampling.beam_width)
