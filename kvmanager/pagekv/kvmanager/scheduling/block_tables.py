"""The blocks of sequences: reuse and allocation at admission, fork with copy-on-write, and freeing.

A published block is never written again. A sequence that has to write into a block that others may read, or that
continues in the middle of such a block, gets a copy first. Copies run before the step computes anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import media_keys
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks
from pagekv.kvmanager.scheduling.counters import SchedulerCounters
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.publishing import Publisher
from pagekv.kvmanager.scheduling.sequence import NO_BLOCKS, Seq
from pagekv.kvmanager.scheduling.step_plan import Admitted, CopyKind, CopyList
from pagekv.kvmanager.scheduling.step_room import StepRoom
from pagekv.kvmanager.scheduling.swapping import Swapper


@dataclass(slots=True)
class Arrival:
    """A sequence to admit, and the blocks that it reuses: a sibling's or cached ones, then host blocks or a copy."""

    sequence: Seq
    # Another sequence of the request that holds blocks, or comes before in the same admission, and how many leading
    # blocks the two share; `admit` sets `shared` to 0 if more blocks are cached.
    sibling: Seq | None = None
    shared: int = 0
    # `admit` fills in the rest.
    hits: Blocks = field(default_factory=lambda: NO_BLOCKS)
    host_blocks: list[int] = field(default_factory=list)
    # The cached block whose first `copied` tokens are copied; -1: none. `alike`: leading tokens that the best cached
    # block shares, also if this very step computes that block, so that it cannot be copied; None: not looked up.
    source: int = -1
    copied: int = 0
    alike: int | None = None
    num_fresh: int = 0
    num_computed: int = 0


class BlockTables:
    """Allocates and frees the blocks of all sequences, in the pools of one epoch."""

    def __init__(self, pool: BlockPool, host: HostPool, limits: SchedulerLimits, counters: SchedulerCounters) -> None:
        self.pool = pool
        self.host = host
        self._block_size = pool.block_size
        self.limits = limits
        self.counters = counters
        self.room = StepRoom(limits.max_step_bytes, limits.max_running, limits.id_bytes)
        self.swapper = Swapper(pool, host, self.room, counters, shared=limits.prefix_cache)
        writes_back = limits.write_back and limits.prefix_cache and host.num_blocks
        self._on_evict = self.swapper.write_back if writes_back else None
        self.publisher = Publisher(pool, host, limits)

    def take_copies(self) -> CopyList:
        """The copies of the step just planned, in order. Blocks published from now on belong to the next step."""
        self.publisher.next_step()
        return self.room.take_copies()

    # -- allocating

    def allocate(self, count: int, tenant: int = 0, *, over_floors: bool = False) -> Blocks | None:
        """Allocates `count` blocks, or None, with nothing taken, if fewer are free. May write evicted blocks back."""
        return self.pool.allocate(count, self._on_evict, tenant, over_floors=over_floors)

    def allocate_each(self, sequences: Sequence[Seq]) -> Blocks | None:
        """Allocates one block for each of these sequences; None, with nothing taken, if fewer are free."""
        if self.pool.tenants is None:
            return self.pool.allocate(len(sequences), self._on_evict)
        numbers = np.array([sequence.request.tenant for sequence in sequences])
        blocks = np.empty(len(sequences), np.int32)
        for tenant in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == tenant)
            found = self.allocate(len(mine), tenant)
            if found is None:
                self.pool.free(blocks[numbers < tenant])
                return None
            blocks[mine] = found
        return blocks

    def admit(self, arrivals: Sequence[Arrival], keep_free: int, *, over_floors: bool = False) -> int:
        """Gives each sequence of a request its cached prefix, or the blocks that it shares with a sibling if they are
        as many, and fresh blocks for all other known tokens. `keep_free` blocks stay free. Returns 0, or how many more
        blocks would have to be free; then nothing has changed. `over_floors`: blocks that floors keep for other tenants
        count as free.
        """
        room = self.room.copies_left
        for arrival in arrivals:
            room -= self._look_up(arrival, room)
        missing = self._reserve(arrivals, keep_free, over_floors)
        if not missing:
            for arrival in arrivals:
                self._commit(arrival, over_floors)
        return missing

    def _look_up(self, arrival: Arrival, room: int) -> int:
        """Finds the blocks that the arrival can reuse, with at most `room` copies; returns how many it may need."""
        sequence, size = arrival.sequence, self._block_size
        known, identity = sequence.num_tokens, sequence.request.command.identity
        reads = self.limits.prefix_cache and identity.read
        if reads:
            # At least one token is computed, or there would be no logits to sample from.
            arrival.hits = self._match(sequence, (known - 1) // size)
        elif self.host.num_blocks:
            # Blocks that it recomputes get their own digest objects. Blocks kept in the host pool bring theirs.
            self._disown(sequence, 0)
        if arrival.shared < len(arrival.hits):
            arrival.shared = 0
        if arrival.shared:
            arrival.hits = NO_BLOCKS
        first = arrival.shared or len(arrival.hits)
        arrival.num_fresh = -(-known // size) - first
        arrival.num_computed = first * size
        # Each fresh block may evict a cached one, which is then written back.
        evicted = arrival.num_fresh if self._on_evict else 0
        if self.host.num_blocks:
            arrival.host_blocks, computed = self.swapper.match(sequence, first, room - evicted)
            if arrival.host_blocks:
                arrival.num_computed = computed
        copies = reads and self.limits.partial_hits and not identity.media
        if copies and not arrival.host_blocks and not arrival.shared:
            self._match_partial(arrival)
        return evicted + len(arrival.host_blocks)

    def _reserve(self, arrivals: Sequence[Arrival], keep_free: int, over_floors: bool) -> int:
        """Holds all blocks that are reused. Returns 0, or how many blocks are missing, with nothing held."""
        pool = self.pool
        needed = sum(arrival.num_fresh for arrival in arrivals)
        hits = [arrival.hits for arrival in arrivals if len(arrival.hits)]
        touched = (np.unique(np.concatenate(hits)) if len(hits) > 1 else hits[0]) if hits else None
        wanted = needed + keep_free
        if pool.tenants is None and touched is not None and pool.num_free - len(touched) > wanted + len(arrivals):
            # Enough blocks even if all touched ones are free now, sources of copies included: no need to count exactly.
            free = pool.num_free - len(touched)
        elif over_floors:
            free = pool.num_free - (0 if touched is None else pool.num_unheld(touched))
        else:
            free = pool.num_free_for(arrivals[0].sequence.request.tenant, touched)
        spare = free - wanted
        if spare < 0:
            return -spare
        for arrival in arrivals:
            if len(arrival.hits):
                # Hits count for the eviction order only at first admission, not when a preempted sequence returns.
                (pool.touch if arrival.sequence.cached_tokens is None else pool.share)(arrival.hits)
            if arrival.host_blocks:
                self.host.hold(arrival.host_blocks)
        for arrival in arrivals:
            if arrival.copied and not pool.ref_count(arrival.source):
                # The source of a copy is held until it is copied. If it is free, that takes one more free block; if
                # none is left, nothing is copied.
                if spare:
                    spare -= 1
                else:
                    arrival.copied = 0
            if arrival.copied:
                pool.share(np.array([arrival.source], np.int32))
        return 0

    def _commit(self, arrival: Arrival, over_floors: bool) -> None:
        """Allocates the reserved blocks, lists the copies and fills the block table."""
        pool, sequence = self.pool, arrival.sequence
        begin = arrival.hits
        if arrival.shared:
            assert arrival.sibling is not None
            begin = np.array(arrival.sibling.block_table[: arrival.shared], np.int32)
            pool.share(begin)
            if self.limits.prefix_cache:
                self.publisher.extend_digests(sequence)
        fresh = self.allocate(arrival.num_fresh, sequence.request.tenant, over_floors=over_floors)
        if fresh is None:
            raise InvariantError(f"{arrival.num_fresh} blocks were free and could not be allocated")
        if arrival.copied:
            self.room.copies.add(CopyKind.COPY, [arrival.source], [int(fresh[0])])
            pool.free(np.array([arrival.source], np.int32))
        if arrival.host_blocks:
            self.swapper.swap_in(arrival.host_blocks, fresh[: len(arrival.host_blocks)].tolist())
        elif not arrival.shared:
            # Blocks that were void, or removed by a reset, are not among its blocks any more, so it may publish again.
            sequence.publishes = sequence.request.command.identity.write
        self.swapper.release(sequence, arrival.host_blocks, len(begin))
        sequence.block_table = array("i", begin.tobytes())
        sequence.block_table.frombytes(fresh.tobytes())
        sequence.num_published = len(begin)
        sequence.num_computed = arrival.num_computed + arrival.copied

    def admitted(self, arrival: Arrival) -> Admitted:
        """The outcome of a prompt's prefix lookup. Must be called after its first admission, before it publishes."""
        sequence, size, from_host = arrival.sequence, self._block_size, len(arrival.host_blocks)
        hits, identity = sequence.num_published + from_host, sequence.request.command.identity
        if not (self.limits.prefix_cache and identity.read) or hits == sequence.num_tokens // size:
            return Admitted(sequence, hits, None, 0)
        self.publisher.extend_digests(sequence)
        digest, start, end = sequence.digests[hits], hits * size, (hits + 1) * size
        if self.host.lookup(digest) is not None or self.pool.table.lookup(digest) is not None:
            # Cached, but no hit: the prompt's last block, of which one token must be computed, or a block of the host
            # pool for whose copy the step has no room.
            return Admitted(sequence, hits, None, 0)
        # A block that is not on the device has no children there.
        alike = 0 if from_host or media_keys(identity.media, start, end) else arrival.alike
        if alike is None:
            parent = sequence.block_table[hits - 1] if hits else sequence.request.root
            _, alike = self.pool.table.trie.longest_run(parent, np.array(sequence.token_ids[start:end], np.uint32))
        return Admitted(sequence, hits, digest, alike)

    def _match(self, sequence: Seq, most: int) -> Blocks:
        """Longest leading run of cached blocks, at most `most`; updates `sequence.digests` for them."""
        size, table, digests = self._block_size, self.pool.table, sequence.digests
        chunks = sequence.view(size, 0, most)
        text = min(most, sequence.first_media // size)
        root, hint = sequence.request.root, sequence.hint
        # From the first medium on, token ids alone do not identify a block.
        known = 0
        unchanged = sequence.hint_generation is table.generation
        if len(hint) and text == most:
            known = min(len(hint), most) if unchanged else table.trie.verify(root, hint, chunks)
        hint = hint[:known]
        blocks = table.trie.match(int(hint[-1]) if known else root, chunks[known:text])
        found = known + len(blocks)
        # With a host pool, the sequence takes over the table's digest objects: the host pool knows a prefix by them.
        begin = len(digests)
        if self.host.num_blocks:
            begin = known if unchanged else 0
        if begin < found:
            digests[begin:found] = table.digests([*hint[begin:].tolist(), *blocks[max(0, begin - known) :]])
        if found < most:
            self.publisher.extend_digests(sequence)
            if found == text:
                # From the first medium on, blocks are found by digest.
                before = blocks[-1] if blocks else sequence.request.root
                blocks += self.pool.match(before, digests[found:most], chunks[found:])
                digests[found : len(blocks)] = table.digests(blocks[found:])
            else:
                self.pool.count_collision(digests[found])
        if self.host.num_blocks:
            self._disown(sequence, known + len(blocks))
        hits = np.fromiter(blocks, np.int32, len(blocks))
        sequence.hint = np.concatenate([hint, hits]) if known else hits
        sequence.hint_generation = table.generation
        return sequence.hint

    def _disown(self, sequence: Seq, first: int) -> None:
        """Copies digest objects from block `first` on that a tier may share: nothing void must be found by them."""
        left = slice(first, sequence.num_lent)
        sequence.digests[left] = [bytes(memoryview(digest)) for digest in sequence.digests[left]]
        sequence.num_lent = first

    def _match_partial(self, arrival: Arrival) -> None:
        """Finds the cached block after the hits that shares most leading tokens with the next block."""
        sequence, hits = arrival.sequence, arrival.hits
        start = len(hits) * self._block_size
        end = min(sequence.num_tokens - 1, start + self._block_size)
        if start < end:
            parent = int(hits[-1]) if len(hits) else sequence.request.root
            wanted = np.array(sequence.token_ids[start:end], np.uint32)
            block, arrival.alike = self.pool.table.trie.longest_run(parent, wanted)
            if arrival.alike and not self.publisher.is_being_computed(block):
                arrival.source, arrival.copied = block, arrival.alike

    def may_fork(self, children: Sequence[Seq], *, recomputed: int) -> bool:
        """Whether the next step has room for the copies of a fork, and for writing back blocks that it evicts."""
        size, sharing = self._block_size, self.limits.fork_sharing
        shared = sum((child.num_tokens - recomputed) // size for child in children) if sharing else 0
        fresh = sum(-(-child.num_tokens // size) for child in children) - shared
        return fresh * (2 if self._on_evict else 1) <= self.room.copies_left

    def fork(self, parents: Sequence[Seq], children: Sequence[Seq], *, recomputed: int) -> bool:
        """Gives each child its parent's blocks for the tokens that the child knows, except the last `recomputed`
        tokens. Full blocks are shared, and the block that the child will write is copied; without fork sharing all
        blocks are copied. Returns False, with nothing changed, if there are not enough blocks for all children, or the
        next step has no room for the copies.
        """
        if not self.may_fork(children, recomputed=recomputed):
            return False
        size = self._block_size
        computed = [child.num_tokens - recomputed for child in children]
        # For each child: leading blocks that it shares with its parent, and its blocks in all.
        shares = [count // size if self.limits.fork_sharing else 0 for count in computed]
        ends = [-(-child.num_tokens // size) for child in children]
        needed = sum(ends) - sum(shares)
        fresh = self.allocate(needed, children[0].request.tenant) if children else NO_BLOCKS
        if fresh is None:
            return False
        copies = iter(fresh.tolist())
        for parent, child, count, shared, end in zip(parents, children, computed, shares, ends, strict=True):
            child.block_table = parent.block_table[:shared]
            self.pool.share(child.blocks())
            for index in range(shared, end):
                child.block_table.append(next(copies))
                if index * size < count:
                    self.room.copies.add(CopyKind.COPY, [parent.block_table[index]], [child.block_table[index]])
            child.digests = parent.digests[: count // size]
            child.num_computed = count
            child.publishes = parent.publishes
            child.num_published = min(parent.num_published, shared)
        return True

    def invalidate(self, sequence: Seq, position: int) -> None:
        """Voids the sequence's content from this position on: no block of either tier that holds it can be hit any
        more, and the sequence counts as computed only up to `position`.
        """
        first = position // self._block_size
        if self.limits.prefix_cache:
            self.publisher.extend_digests(sequence)
            self.pool.invalidate(sequence.digests[first:])
            self.host.invalidate(sequence.digests[first:])
        sequence.num_computed = min(sequence.num_computed, position)
        sequence.num_published = min(sequence.num_published, first)
        # Nothing tells which of the blocks kept in the host pool are void, so all of them are released.
        self.swapper.release(sequence)

    # -- freeing

    def swap_out(self, group: Sequence[Seq]) -> None:
        """Copies what these sequences have computed to the host pool, if policy and room allow. Comes before `free`."""
        policy = self.limits.swap
        if policy.mode != "recompute" and self.host.num_blocks:
            for sequence in group:
                self.publisher.publish(sequence)
                last = sequence.num_published - 1
                # A block that left the table as void, or in a reset, must not come back under its digest.
                if last >= 0 and not self.pool.table.is_entered(sequence.block_table[last]):
                    sequence.publishes = False
            if policy.swaps(*self.swapper.cost(group)):
                self.swapper.swap_out(group)

    def free(self, sequence: Seq) -> None:
        """Publishes the blocks that are full by now and frees every block, last block first."""
        self.publisher.publish(sequence)
        self.discard(sequence)

    def discard(self, sequence: Seq) -> None:
        """Frees every block without publishing."""
        # Copies into these blocks that are already listed stay listed: the next owner's copies come later in the list,
        # and a listed swap-out may still read them.
        sequence.hint, sequence.hint_generation = sequence.blocks(), None
        sequence.num_lent = len(sequence.digests)
        self.pool.free(sequence.hint)
        sequence.block_table = array("i")
        sequence.num_published = 0
        sequence.num_computed = 0
