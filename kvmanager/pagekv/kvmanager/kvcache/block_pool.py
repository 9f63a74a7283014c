"""The device pool: the holders of each block, and which block is evicted next. The prefix table has the contents.

States of a block (an entry in parallel arrays, not an object; DESIGN 5):

    free      ref_count 0, not in the table     in the free queue
    cached    ref_count 0, in the table         in the free queue: can be hit, or evicted
    active    ref_count > 0, not in the table   private to its holder, which may write to it
    shared    ref_count > 0, in the table       read by any number of sequences, never written again

Moves: `allocate` free|cached → active (evicting); `publish_chain` and `publish_one_each` active → shared; `touch` and
`share` add a holder and take the block out of the free queue; `free` removes one and, at 0, puts the block into the
free queue. All of them take batches of blocks and need only a few vector operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.events.log import TableLog
from pagekv.kvmanager.kvcache.eviction_policy import EvictionOrder
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens, Names, PrefixTable
from pagekv.kvmanager.kvcache.prefix_trie import Node
from pagekv.kvmanager.kvcache.tenant_order import TenantOrder

# If at least so many blocks are evicted at once, they are retired, see `digest_map`.
RETIRED_TOGETHER = 1024
_NO_BLOCKS = np.empty(0, np.int32)


def _ignore(digests: Sequence[bytes]) -> None:
    pass


class BlockPool:
    """Fixed pool of `num_blocks` blocks of `block_size` tokens. No structure grows with the number of requests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        order: EvictionOrder | None = None,
        log: TableLog | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`order` must contain every block; least recently used by default. `clock` as in `PrefixTable`."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Holders of every block, [num_blocks]. Not to be changed by others.
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.table = PrefixTable(num_blocks, block_size, self.ref_counts, clock)
        self._free: EvictionOrder | TenantOrder = order if order is not None else EvictionOrder(num_blocks)
        # The same object as `_free` once there is a tenant besides tenant 0, or a configuration of tenants.
        self.tenants: TenantOrder | None = None
        self._log = log
        self.evictions = 0
        self.hash_alarms = 0

    # -- gauges

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that have a content and can be hit."""
        return int(np.count_nonzero(self.table.published & (self.ref_counts == 0)))

    @property
    def num_active(self) -> int:
        """Blocks held by at least one sequence or pin."""
        return self.num_blocks - len(self._free)

    @property
    def num_published(self) -> int:
        return len(self.table)

    def ref_count(self, block: int) -> int:
        return int(self.ref_counts[block])

    def num_unheld(self, blocks: Blocks) -> int:
        """How many of these blocks nobody holds, that is how many fewer are free once all are touched."""
        return len(blocks) - int(np.count_nonzero(self.ref_counts[blocks]))

    # -- tenants

    def set_tenants(self, weights: Mapping[int, float], floors: Mapping[int, int]) -> None:
        """Replaces all weights and floors, by tenant; a tenant that is not named has weight 1 and floor 0. Floors are
        the blocks of a tenant that others cannot evict. Raises ValueError, with nothing changed, if they exceed the
        pool.
        """
        if weights or floors or self.tenants is not None:
            self._share().configure(weights, floors)

    def _share(self) -> TenantOrder:
        if self.tenants is None:
            assert isinstance(self._free, EvictionOrder)
            self._free = self.tenants = TenantOrder(self._free, self.table.published)
        return self.tenants

    def num_free_for(self, tenant: int, touched: Blocks | None = None) -> int:
        """Blocks that can be allocated for this tenant once the blocks `touched`, none named twice, are touched."""
        if self.tenants is None:
            return len(self._free) - (0 if touched is None else self.num_unheld(touched))
        unheld = _NO_BLOCKS if touched is None else touched[self.ref_counts[touched] == 0]
        return self.tenants.num_free_for(tenant, unheld)

    # -- prefix table

    def match(self, parent: Node, digests: Sequence[bytes], tokens: BlockTokens) -> list[int]:
        """Longest leading run of cached blocks after `parent`, a block or a chain's root; changes nothing but the alarm
        counter. `tokens` has the token ids of at least as many blocks as there are digests.
        """
        blocks, collided = self.table.match(parent, digests, tokens)
        self.hash_alarms += collided
        return blocks

    def count_collision(self, digest: bytes) -> None:
        """Raises the alarm if a digest whose tokens were not found is in the table: it is another content's."""
        self.hash_alarms += self.table.lookup(digest) is not None

    def publish_one_each(
        self,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        parents: Sequence[Node],
        parent_digests: Sequence[bytes],
        tokens: BlockTokens,
    ) -> list[int]:
        """Enters full, held blocks without media into the prefix table, one of each of several sequences; see
        `PrefixTable.add_one_each`. Returns the positions of blocks that it left out, for `publish_chain`.
        """
        self._check_held(np.array(blocks, np.int32))
        left_out = self.table.add_one_each(blocks, digests, parents, parent_digests, tokens)
        if self._log is not None and self._log.watched:
            firsts = [isinstance(parent, bytes) for parent in parents]
            if left_out or any(firsts):
                for at in sorted(set(range(len(blocks))).difference(left_out)):
                    one = slice(at, at + 1)
                    names = self.table.names(blocks[one])
                    self._log.stored(
                        digests[one], parent_digests[one], tokens[one], text=True, first=firsts[at], names=names
                    )
            else:
                names = self.table.names(blocks)
                self._log.stored(digests, parent_digests, tokens, text=True, first=False, names=names)
        return left_out

    def publish_chain(
        self,
        blocks: Blocks,
        digests: Sequence[bytes],
        parent: bytes,
        tokens: BlockTokens,
        *,
        first: bool,
        media: bool,
        names: Names | None = None,
    ) -> bool:
        """Enters consecutive full, held blocks of one sequence, at least one, into the prefix table, the first one
        after the digest `parent`; see `PrefixTable.add_chain`. Returns False after a hash collision, which raises the
        alarm: the sequence must not publish any more.
        """
        self._check_held(blocks)
        entered, superseded, heirs, collided = self.table.add_chain(
            blocks, digests, parent, tokens, first=first, media=media, names=names
        )
        self.hash_alarms += collided
        if superseded:
            self._free.supersede(superseded, heirs)
        if entered and self._log is not None and self._log.watched:
            parents = [parent, *digests[:-1]]
            self._log.stored(
                [digests[at] for at in entered],
                [parents[at] for at in entered],
                tokens[entered],
                text=not media,
                first=first and entered[0] == 0,
                names=[names] * len(entered) if names is not None else None,
            )
        return not collided

    def _check_held(self, blocks: Blocks) -> None:
        if self.num_unheld(blocks):
            raise InvariantError(f"publish of blocks that nobody holds, among {blocks[:8].tolist()}")

    def invalidate(self, digests: Sequence[bytes]) -> None:
        """Removes void contents, and all blocks that follow them, from the prefix table; held blocks become private."""
        blocks = [block for digest in digests if (block := self.table.lookup(digest)) is not None]
        if blocks:
            self._remove(np.array(blocks, np.int32))

    def _remove(self, blocks: Blocks) -> None:
        # Blocks that follow a removed block leave the table with it; they stay free or held.
        removed, digests = self.table.remove(blocks)
        self._free.invalidate(removed)
        if self._log is not None:
            self._log.removed(digests)

    def _evict(self, blocks: Blocks) -> None:
        """`_remove` for free blocks whose memory is taken for something else."""
        log = self._log
        removed = None
        if len(blocks) >= RETIRED_TOGETHER:
            removed = self.table.retire(blocks, _ignore if log is None else log.removal_note())
        if removed is None:
            self._remove(blocks)
            return
        self._free.invalidate(removed)
        if log is not None and log.watched:
            log.left(self.table.digests(removed.tolist()))

    def clear_prefix_table(self) -> int:
        """Removes every block from the prefix table; returns how many. Held blocks stay held and become private."""
        if self._log is not None:
            self._log.cleared()
        self._free.invalidate(np.flatnonzero(self.table.published).astype(np.int32))
        return self.table.clear()

    # -- holding

    def touch(self, blocks: Blocks) -> None:
        """`share` for a prefix hit on the leading blocks of a prompt; the eviction order counts the hit."""
        self.share(blocks)
        self._free.hit(blocks)

    def share(self, blocks: Blocks) -> None:
        """Adds a holder to each block, none named twice; cached blocks leave the free queue, safe from eviction."""
        counts = self.ref_counts[blocks]
        unheld = blocks[counts == 0]
        if len(unheld):
            self._free.remove(unheld)
        self.ref_counts[blocks] = counts + 1

    def allocate(
        self,
        count: int,
        on_evict: Callable[[Blocks], None] | None = None,
        tenant: int = 0,
        *,
        over_floors: bool = False,
    ) -> Blocks | None:
        """Takes `count` blocks from the head of the free queue, or as `TenantOrder` decides, evicting cached ones;
        None, with nothing taken, if fewer are free for this tenant. `on_evict` is called with the blocks to be evicted
        while the prefix table still has them. `over_floors`: ignores the floors of other tenants.
        """
        tenants = self._share() if tenant and self.tenants is None else self.tenants
        if tenants is None:
            assert isinstance(self._free, EvictionOrder)
            if count > len(self._free):
                return None
            blocks = self._free.pop(count)
        else:
            if count > (len(self._free) if over_floors else self.num_free_for(tenant)):
                return None
            blocks = tenants.take(count, tenant, over_floors=over_floors)
        cached = blocks[self.table.published[blocks]]
        if len(cached):
            self.evictions += len(cached)
            if on_evict is not None:
                on_evict(cached)
            self._evict(cached)
        self.ref_counts[blocks] = 1
        return blocks

    def free(self, blocks: Blocks) -> None:
        """Removes a holder from each block of a sequence's table. The last block enters the free queue first, so at
        equal age the deepest block is evicted first and a chain never has a hole before its tail. If another held block
        has the same content, it takes over the entry in the prefix table, see `PrefixTable.let_go`.
        """
        left = self.ref_counts[blocks] - 1
        if len(left) and left.min() < 0:
            raise InvariantError(f"free of block {int(blocks[left.argmin()])}, which nobody holds")
        self.ref_counts[blocks] = left
        unheld = blocks[left == 0][::-1]
        if len(unheld):
            if self.table.has_twins:
                superseded, heirs = self.table.let_go(unheld.tolist())
                self._free.supersede(superseded, heirs)
            self._free.append(unheld)
