"""Long prompts on their way to the scheduler or to a question: the event loop is never held for a whole one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pagekv.common.turns import let_others_run
from pagekv.kvmanager.kvcache.block_hash import MediaSpan
from pagekv.kvmanager.kvcache.prefix_table import PrefixTable
from pagekv.kvmanager.scheduling.prepared_prompt import PreparedPrompt, slice_blocks
from pagekv.kvmanager.tenants.turns import TenantTurns


class LongPrompts:
    """Prepares prompts of more than a slice, one of each tenant at a time, with turns of the event loop between."""

    def __init__(self, pack: Callable[[array[int]], bytes] | None) -> None:
        """`pack` as in `PreparedPrompt.slices`."""
        self._pack = pack
        # Held by the call of a tenant that is entering.
        self.turns = TenantTurns()
        # Sequences of the calls that have a turn or wait for it, by tenant.
        self.num_entering: Counter[str] = Counter()

    @contextmanager
    def entering(self, tenant: str, num_sequences: int) -> Iterator[None]:
        """Counts so many sequences of a call among those that are entering."""
        self.num_entering[tenant] += num_sequences
        try:
            yield
        finally:
            self.num_entering[tenant] -= num_sequences
            if not self.num_entering[tenant]:
                del self.num_entering[tenant]

    async def prepare(
        self, token_ids: Sequence[int], media: Sequence[MediaSpan], root: bytes, table: PrefixTable
    ) -> PreparedPrompt | None:
        """A prepared prompt behind the digest `root`; None, at once, for one that fits into a slice."""
        if len(token_ids) <= slice_blocks(table.block_size, len(media)) * table.block_size:
            return None
        prepared = PreparedPrompt(root)
        tokens = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        for _ in prepared.slices(tokens, media, table, self._pack):
            await let_others_run()
        return prepared
