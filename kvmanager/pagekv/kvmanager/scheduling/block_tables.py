"""How sequences hold blocks: what an admission reuses and takes, what is published, fork and copy-on-write.

A published block is never written again: a sequence that has to write into a block others may read, or that starts in
the middle of one, gets a copy first (CHECKLIST J1, J3, J4). Copies run before the step computes anything.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_hash import TOKEN_BYTES, chain_digests, sha256
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens
from pagekv.kvmanager.kvcache.prefix_trie import Node
from pagekv.kvmanager.scheduling.sequence import Seq
from pagekv.kvmanager.scheduling.step_plan import BlockCopy, CopyKind
from pagekv.kvmanager.scheduling.swapping import SwapCounters, Swapper, SwapPolicy

_NO_BLOCKS = np.empty(0, np.int32)


@dataclass(slots=True)
class Arrival:
    """A sequence to admit, and with whom it shares leading blocks: another of its request that holds blocks, or comes
    before it in the same admission. `shared` is how many.
    """

    sequence: Seq
    sibling: Seq | None = None
    shared: int = 0


@dataclass(slots=True)
class _Take:
    """What an arrival reuses: cached blocks of the device, then host blocks or tokens of a cached block to copy."""

    sequence: Seq
    hits: Blocks = field(default_factory=lambda: _NO_BLOCKS)
    kept: list[int] = field(default_factory=list)
    source: int = -1
    copied: int = 0
    num_fresh: int = 0
    num_computed: int = 0


class BlockTables:
    """The one place where blocks are taken for sequences and given back."""

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        swap_counters: SwapCounters,
        *,
        prefix_cache: bool,
        partial_hits: bool,
        fork_sharing: bool = True,
        write_back: bool = False,
    ) -> None:
        """`prefix_cache`: reuse blocks across requests. `partial_hits`: also the beginning of a block, by copying.
        `fork_sharing` is another matter: the sequences of one request hold blocks together (CHECKLIST J6).
        `write_back`: what is evicted from the device goes to the host pool.
        """
        self.pool = pool
        self._block_size = pool.block_size
        self._prefix_cache = prefix_cache
        self._partial_hits = partial_hits
        self._fork_sharing = fork_sharing
        # What the next step has to copy, in order.
        self._moves: list[BlockCopy] = []
        self._swapper = Swapper(pool, host, self._moves, swap_counters, shared=prefix_cache)
        self._on_evict = self._swapper.write_back if write_back and prefix_cache else None
        # Published blocks that this very step computes: they can be hit, for a layer writes all of a step's keys and
        # values before it attends, but not copied, for copies come before everything else.
        self._being_computed: list[Blocks] = []

    def begin_step(self) -> None:
        """From now on what is published belongs to the next step."""
        self._being_computed.clear()

    def take_moves(self) -> list[BlockCopy]:
        """What a step that has been planned must copy, in order."""
        moves = self._moves[:]
        self._moves.clear()
        return moves

    # -- taking

    def allocate(self, count: int) -> Blocks | None:
        """`BlockPool.allocate`, with write-back of evicted blocks where that is on."""
        return self.pool.allocate(count, self._on_evict)

    def admit(self, arrivals: Sequence[Arrival], keep_free: int) -> int:
        """Takes for each sequence the cached prefix, or what it shares with another of its request if that is as much,
        and blocks for every other known token. Returns 0, or how many blocks more would have to be free; then nothing
        has changed. `keep_free` blocks are left free.
        """
        pool = self.pool
        takes = [self._look_up(arrival) for arrival in arrivals]
        needed = sum(take.num_fresh for take in takes)
        hits = [take.hits for take in takes if len(take.hits)]
        unheld = pool.num_unheld(np.unique(np.concatenate(hits)) if len(hits) > 1 else hits[0]) if hits else 0
        spare = pool.num_free - needed - keep_free - unheld
        if spare < 0:
            return -spare
        # First of all nothing that is needed may be given away.
        for take in takes:
            if len(take.hits):
                # Only a prompt that comes again proves its blocks; a sequence that returns after preemption does not.
                (pool.touch if take.sequence.cached_tokens is None else pool.share)(take.hits)
            # Neither may what is written back now take their place.
            self._swapper.host.hold(take.kept)
        for take in takes:
            if take.copied and not pool.ref_count(take.source):
                # The source of a copy must be kept until it is copied; if that is one too many, do without.
                take.copied = take.copied if spare else 0
                spare -= 1 if take.copied else 0
            if take.copied:
                pool.share(np.array([take.source], np.int32))
        for take, arrival in zip(takes, arrivals, strict=True):
            self._take(take, arrival)
        return 0

    def _look_up(self, arrival: Arrival) -> _Take:
        """What an arrival can reuse; changes nothing but `arrival.shared`, which is 0 if more is cached."""
        sequence, size = arrival.sequence, self._block_size
        known = len(sequence.token_ids)
        reads = self._prefix_cache and sequence.request.command.identity.read
        take = _Take(sequence)
        if reads:
            # At least one token is computed, or there would be no logits to sample from.
            take.hits = self._match(sequence, (known - 1) // size)
        if arrival.shared < len(take.hits):
            arrival.shared = 0
        if arrival.shared:
            take.hits = _NO_BLOCKS
        first = arrival.shared or len(take.hits)
        take.num_fresh = -(-known // size) - first
        take.num_computed = first * size
        if self._swapper.host.num_blocks:
            take.kept, computed = self._swapper.match(sequence, first)
            if take.kept:
                take.num_computed = computed
        copies = reads and self._partial_hits and not sequence.request.command.identity.media
        if copies and not take.kept and not arrival.shared:
            take.source, take.copied = self._partial_hit(sequence, take.hits)
        return take

    def _take(self, take: _Take, arrival: Arrival) -> None:
        """Allocates, and lists the copies."""
        pool, sequence = self.pool, take.sequence
        begin = take.hits
        if arrival.shared:
            assert arrival.sibling is not None
            begin = np.array(arrival.sibling.block_table[: arrival.shared], np.int32)
            pool.share(begin)
            if self._prefix_cache:
                self._extend_digests(sequence)
        fresh = self.allocate(take.num_fresh)
        if fresh is None:
            raise InvariantError(f"{take.num_fresh} blocks were free and could not be allocated")
        if take.copied:
            self._moves.append(BlockCopy(CopyKind.COPY, take.source, int(fresh[0])))
            pool.free(np.array([take.source], np.int32))
        self._swapper.swap_in(take.kept, fresh[: len(take.kept)].tolist())
        self._swapper.host.release(take.kept)
        self._swapper.drop(sequence)
        sequence.block_table = array("i", begin.tobytes())
        sequence.block_table.frombytes(fresh.tobytes())
        sequence.num_published = len(begin)
        sequence.num_computed = take.num_computed + take.copied

    def _match(self, sequence: Seq, most: int) -> Blocks:
        """Longest leading run of cached blocks, at most `most`; brings `digests` along."""
        size, table, digests = self._block_size, self.pool.table, sequence.digests
        chunks = sequence.chunks(size, 0, most)
        text = min(most, sequence.first_media // size)
        blocks = table.match_tokens(sequence.request.root, chunks[:text])
        found = len(blocks)
        digests += table.digests(blocks[len(digests) :])
        if found < most:
            self._extend_digests(sequence)
            if found == text:
                # From the media on by digest.
                blocks += self.pool.match(digests[found:most], chunks[found:])
            else:
                self.pool.count_collision(digests[found])
        return np.array(blocks, np.int32)

    def _partial_hit(self, sequence: Seq, hits: Blocks) -> tuple[int, int]:
        """The block that shares most tokens behind the hits, and how many of them need not be computed."""
        start = len(hits) * self._block_size
        end = min(len(sequence.token_ids) - 1, start + self._block_size)
        wanted = np.array(sequence.token_ids[start:end], np.uint32)
        if not len(wanted):
            return -1, 0
        parent = int(hits[-1]) if len(hits) else sequence.request.root
        block, shared = self.pool.table.longest_run(parent, wanted)
        if shared and any((blocks == block).any() for blocks in self._being_computed):
            return -1, 0
        return block, shared

    def fork(self, parent: Seq, children: Sequence[Seq]) -> bool:
        """Gives each child the blocks before the parent's last prompt position, shared, and a copy of the block with
        it, so that each can compute that position and go on by itself. All of them, or none: False, and nothing has
        changed, when there are not enough blocks, or sequences share none.

        The parent has computed its prompt in an earlier step; the children know exactly the prompt.
        """
        size = self._block_size
        last = len(parent.request.command.prompt_ids) - 1
        shared = last // size
        copies = self.allocate(len(children)) if self._fork_sharing else None
        if copies is None:
            return False
        table = parent.block_table
        for child, copy in zip(children, copies.tolist(), strict=True):
            self.pool.share(np.array(table[:shared], np.int32))
            if last % size:
                self._moves.append(BlockCopy(CopyKind.COPY, table[shared], copy))
            child.block_table = table[:shared]
            child.block_table.append(copy)
            child.digests = parent.digests[:shared]
            child.num_published = shared
            child.num_computed = last
        return True

    def fork_beams(self, parents: Sequence[Seq], children: Sequence[Seq]) -> bool:
        """Gives each child what its parent has computed: the full blocks, shared, and a copy of a partial last one; a
        copy of everything where sequences share none. All of them, or none: False, and nothing has changed, when there
        are not enough blocks.
        """
        # Leading blocks of each parent that its child shares, and those behind them.
        shares = [parent.num_computed // self._block_size if self._fork_sharing else 0 for parent in parents]
        sources = [parent.block_table[shared:] for parent, shared in zip(parents, shares, strict=True)]
        copies = self.allocate(sum(map(len, sources)))
        if copies is None:
            return False
        fresh = iter(copies.tolist())
        for parent, child, shared, copied in zip(parents, children, shares, sources, strict=True):
            child.block_table = parent.block_table[:shared]
            self.pool.share(child.blocks())
            for source in copied:
                child.block_table.append(next(fresh))
                self._moves.append(BlockCopy(CopyKind.COPY, source, child.block_table[-1]))
            child.num_computed = parent.num_computed
            # Of copies too: they must not be offered, for they may come to be given back before they are made.
            child.num_published = parent.num_published
        return True

    # -- publishing

    def publish(self, sequence: Seq, *, computed_now: bool = False) -> None:
        """Offers to the prefix table every block that is full, known and planned to be written; `computed_now`: by the
        step being planned.
        """
        size = self._block_size
        first, full = sequence.num_published, min(len(sequence.token_ids), sequence.num_computed) // size
        if full <= first:
            return
        sequence.num_published = full
        if not (self._prefix_cache and sequence.publishes):
            return
        self._extend_digests(sequence)
        digests, blocks = sequence.digests, sequence.blocks()[first:full]
        chunks = sequence.chunks(size, first, full)
        # What comes before the media is told by its tokens, like any other text.
        border = min(max(first, sequence.first_media // size), full)
        for begin, end, media in ((first, border, False), (border, full, True)):
            if begin < end and sequence.publishes:
                parent = digests[begin - 1] if begin else sequence.request.root
                if not self._is_entered(sequence, begin - 1, parent):
                    sequence.publishes = False
                    break
                here = slice(begin - first, end - first)
                sequence.publishes = self.pool.publish_chain(
                    blocks[here], digests[begin:end], parent, chunks[here], first=begin == 0, media=media
                )
        if computed_now and self._partial_hits:
            self._being_computed.append(blocks)

    def _is_entered(self, sequence: Seq, index: int, digest: bytes) -> bool:
        """Whether what the table has under a digest really is the sequence's logical block: its own, or another copy of
        the same prefix, which is told by its tokens. Then the next block can be entered after it. -1 is the root.
        """
        if index < 0:
            return True
        entry = self.pool.table.lookup(digest)
        if entry is None or entry == sequence.block_table[index] or index * self._block_size >= sequence.first_media:
            return entry is not None
        walked = self.pool.table.match_tokens(sequence.request.root, sequence.chunks(self._block_size, 0, index + 1))
        return len(walked) == index + 1 and walked[-1] == entry

    def grow(self, sequences: Sequence[Seq], blocks: Blocks, chunks: BlockTokens) -> None:
        """Appends one block to each table, [n], whose last one is full by then with token ids `chunks`,
        [n, block_size], and publishes that one. What a decoding sequence does once in block_size steps.
        """
        size, stride = self._block_size, TOKEN_BYTES * self._block_size
        raw = chunks.tobytes()
        prefix_cache = self._prefix_cache
        ready: list[int] = []
        offered: list[int] = []
        before: list[Node] = []
        digests: list[bytes] = []
        parents: list[bytes] = []
        for position, (sequence, block) in enumerate(zip(sequences, blocks.tolist(), strict=True)):
            table = sequence.block_table
            index = len(table) - 1
            full = index * size + size
            chunk = raw[position * stride : (position + 1) * stride]
            if prefix_cache and sequence.publishes and sequence.num_published == index:
                if full > sequence.first_media:
                    self.publish(sequence)
                else:
                    known = sequence.digests
                    # With blocks of one token the next may be known, and have its digest, already.
                    del known[index:]
                    parent = known[-1] if index else sequence.request.root
                    digest = sha256(parent + chunk).digest()
                    known.append(digest)
                    ready.append(position)
                    offered.append(table[index])
                    before.append(table[index - 1] if index else parent)
                    digests.append(digest)
                    parents.append(parent)
            sequence.num_published = index + 1
            table.append(block)
        if ready:
            for place in self.pool.publish_after(offered, digests, before, parents, chunks[ready]):
                # Not simply the next block: `publish` finds out what stands before it.
                sequence = sequences[ready[place]]
                sequence.num_published -= 1
                self.publish(sequence)

    def _extend_digests(self, sequence: Seq) -> None:
        """Brings `digests` up to the full blocks of the known tokens."""
        size = self._block_size
        full, done = len(sequence.token_ids) // size, len(sequence.digests)
        if done < full:
            parent = sequence.digests[-1] if done else sequence.request.root
            new = sequence.token_ids[done * size : full * size].tobytes()
            sequence.digests += chain_digests(parent, new, size, sequence.request.command.identity.media, done)

    # -- giving back

    def swap_out(self, group: Sequence[Seq], policy: SwapPolicy) -> None:
        """Before `free`: keeps in the host pool what these sequences have computed, if the policy is for it, as far as
        there is room.
        """
        if policy.mode != "recompute" and self._swapper.host.num_blocks:
            for sequence in group:
                self.publish(sequence)
            if policy.swaps(*self._swapper.cost(group)):
                self._swapper.swap_out(group)

    def drop_swapped(self, sequence: Seq) -> None:
        """Gives back what the host pool keeps for a sequence."""
        self._swapper.drop(sequence)

    def free(self, sequence: Seq) -> None:
        """Publishes what is full by now and gives every block back, last block first."""
        self.publish(sequence)
        self.forget(sequence)

    def forget(self, sequence: Seq) -> None:
        """Gives every block back."""
        # Moves into them that are listed already stay: whoever gets these blocks next has his own listed behind, and
        # a swap-out may have read them in between.
        self.pool.free(sequence.blocks())
        sequence.block_table = array("i")
        sequence.num_published = 0
        sequence.num_computed = 0
