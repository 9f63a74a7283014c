"""Bounds of what a tenant's requests may hold at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq


class Cap(NamedTuple):
    """Bounds of a tenant's running requests: how many, and how many blocks they may come to need. None: any."""

    requests: int | None = None
    blocks: int | None = None


def held_back(
    caps: Mapping[int, Cap], heads: Mapping[int, LiveRequest], running: Iterable[Seq], block_size: int
) -> frozenset[int]:
    """Tenants whose next request, in `heads`, would be above their caps beside the running sequences. A request that
    runs already is never held back, nor is the only one of its tenant for its blocks.
    """
    needs: dict[int, dict[LiveRequest, int]] = {}
    for sequence in running:
        if sequence.tenant in caps:
            needs.setdefault(sequence.tenant, {})[sequence.request] = _most_blocks(sequence.request, block_size)
    above = set()
    for tenant, request in heads.items():
        cap, own = caps.get(tenant), needs.get(tenant, {})
        if cap is None or request in own:
            continue
        blocks = sum(own.values()) + _most_blocks(request, block_size)
        too_many = cap.requests is not None and len(own) >= cap.requests
        if too_many or (cap.blocks is not None and bool(own) and blocks > cap.blocks):
            above.add(tenant)
    return frozenset(above)


def _most_blocks(request: LiveRequest, block_size: int) -> int:
    """Blocks that a request may come to need, where its sequences share none."""
    each = [-(-(sequence.max_total - 1) // block_size) for sequence in request.sequences]
    return max(sum(each), max(each, default=0) * request.command.sampling.beam_width)
