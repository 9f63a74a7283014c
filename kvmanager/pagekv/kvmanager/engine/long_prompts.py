"""Preparation of long prompts for the scheduler or a query, in slices: none blocks the event loop as a whole."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pagekv.common.turns import let_others_run
from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.request.tenant_counts import TenantCounts
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt, slice_blocks
from pagekv.kvmanager.tenants.turns import TenantTurns


class LongPrompts:
    """Prepares prompts of more than a slice, one of each tenant at a time; the event loop gets turns in between."""

    def __init__(self, pack: Callable[[array[int]], bytes] | None) -> None:
        """`pack` as in `PreparedPrompt.slices`."""
        self._pack = pack
        # A tenant's turn is held by its call whose prompt is being prepared.
        self.turns = TenantTurns()
        # Calls that have a turn or wait for one, by tenant, and their sequences.
        self.num_entering: TenantCounts[str] = TenantCounts()
        self.num_calls: TenantCounts[str] = TenantCounts()

    @contextmanager
    def entering(self, tenant: str, num_sequences: int) -> Iterator[None]:
        """Counts a call and its sequences as entering meanwhile."""
        self.num_entering.add(tenant, num_sequences)
        self.num_calls.add(tenant, 1)
        try:
            yield
        finally:
            self.num_entering.add(tenant, -num_sequences)
            self.num_calls.add(tenant, -1)

    async def prepare(
        self, token_ids: Sequence[int], media: Sequence[MediaSpan], root: bytes, table: PrefixTable
    ) -> PreparedPrompt | None:
        """Prepares a prompt after the digest `root`; returns None, at once, for a prompt that fits into a slice."""
        if len(token_ids) <= slice_blocks(table.block_size, len(media)) * table.block_size:
            return None
        prepared = PreparedPrompt(root)
        tokens = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        for _ in prepared.slices(tokens, media, table, self._pack):
            await let_others_run()
        return prepared
