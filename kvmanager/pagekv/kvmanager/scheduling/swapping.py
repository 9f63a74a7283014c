"""Swapping between the device pool and the host pool (DESIGN 5).

Full blocks are copied to the host pool under their digests, a partial tail without a key. Returning is a lookup, block
by block: device hit, else host hit, else recompute. Blocks evicted from the device can be copied out, too (write-back).

Every copy is one `BlockCopy`. A step makes its copies in the order in which they were listed, before it computes
anything. Steps are ordered, too. So a device or host block can be reused as soon as its copy is listed.

Swapping costs copies, out now and in later; recomputing costs a prefill of the same tokens. The cheaper way depends on
block size, length and machine (PagedAttention, section 7.3), so `auto` compares both for every victim.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import NO_BLOCK, HostPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks, BlockTokens
from pagekv.kvmanager.scheduling.counters import SchedulerCounters
from pagekv.kvmanager.scheduling.sequence import NO_BLOCKS, Seq, Swapped
from pagekv.kvmanager.scheduling.step_plan import CopyKind
from pagekv.kvmanager.scheduling.step_room import StepRoom


class Swapper:
    """Lists copies between the pools of one epoch."""

    def __init__(
        self, pool: BlockPool, host: HostPool, room: StepRoom, counters: SchedulerCounters, *, shared: bool
    ) -> None:
        """Copies are listed in `room`, for the next step. `shared`: contents are kept under their digests, for every
        sequence with the same prefix; otherwise only for the sequence that held them.
        """
        self.host = host
        self._pool = pool
        self._room = room
        self._counters = counters
        self._shared = shared

    # -- out

    def cost(self, group: Sequence[Seq]) -> tuple[int, int, int]:
        """Cost of swapping these sequences: blocks to copy out now, blocks to copy in later, and the tokens that would
        have to be recomputed instead. Blocks that other sequences hold, too, do not count; blocks that several of these
        sequences hold count once.
        """
        size = self._pool.block_size
        out = back = tokens = 0
        seen = set(self._elsewhere(group))
        for sequence in group:
            blocks = self._written(sequence)
            places = [place for place, block in enumerate(blocks) if block not in seen]
            out += self.host.num_missing(*self._contents(sequence, places))
            back += len(places)
            tokens += len(places) * size
            if places and places[-1] == len(blocks) - 1:
                tokens -= len(blocks) * size - sequence.num_computed
            seen.update(blocks)
        return out, back, tokens

    def swap_out(self, group: Sequence[Seq]) -> None:
        """Copies what these sequences have computed to the host pool, as far as host pool and step have room, before
        their blocks are freed. A block held by several is copied once, and all of them hold the copy. The step needs
        room for every block, even if the host pool has it already.
        """
        # Host block by device block.
        kept = dict.fromkeys(self._elsewhere(group), NO_BLOCK)
        for sequence in group:
            blocks = self._written(sequence)
            places = [place for place, block in enumerate(blocks) if block not in kept]
            names, may = sequence.request.names, places[: self._room.copies_left]
            whose = [names] * len(may) if names is not None else None
            found, fresh = self.host.keep(*self._contents(sequence, may), whose)
            # After the first block that found no room, nothing is kept.
            blocks = blocks if len(found) == len(places) else blocks[: places[len(found)]]
            self.host.hold([kept[block] for block in blocks if kept.get(block, NO_BLOCK) != NO_BLOCK])
            sources = [blocks[place] for place in places[: len(found)]]
            self._room.copies.add(CopyKind.SWAP_OUT, [sources[at] for at in fresh], [found[at] for at in fresh])
            self._counters.swapped_out += len(fresh)
            kept.update(zip(sources, found, strict=True))
            held = [kept[block] for block in blocks]
            if any(block != NO_BLOCK for block in held):
                end = min(sequence.num_computed, len(blocks) * self._pool.block_size)
                sequence.swapped = Swapped(self.host, held, end)

    def _elsewhere(self, group: Sequence[Seq]) -> list[int]:
        """Device blocks of these sequences that other sequences hold, too, and that can be found by their digests."""
        if not self._shared:
            return []
        everything = np.concatenate([NO_BLOCKS, *(sequence.blocks() for sequence in group)])
        blocks, inside = np.unique(everything, return_counts=True)
        stays = (self._pool.ref_counts[blocks] > inside) & self._pool.table.published[blocks]
        found: list[int] = blocks[stays].tolist()
        return found

    def _written(self, sequence: Seq) -> list[int]:
        """The leading device blocks that hold computed tokens."""
        blocks: list[int] = sequence.block_table[: -(-sequence.num_computed // self._pool.block_size)].tolist()
        return blocks

    def _contents(self, sequence: Seq, places: list[int]) -> tuple[list[bytes | None], BlockTokens, list[bytes]]:
        """Contents of the ascending logical blocks `places`, as arguments of `HostPool.keep`: digests, None for private
        blocks, which come last; and, for keyed blocks, the token ids and the digests before them.
        """
        size = self._pool.block_size
        shares = self._shared and sequence.publishes
        full = min(sequence.num_computed // size, len(sequence.digests)) if shares else 0
        keyed = places[: bisect_left(places, full)]
        known, root = sequence.digests, sequence.request.root
        digests: list[bytes | None] = [known[place] for place in keyed]
        digests += [None] * (len(places) - len(keyed))
        parents = [known[place - 1] if place else root for place in keyed]
        return digests, sequence.chunks(size, 0, full)[keyed], parents

    def write_back(self, blocks: Blocks) -> None:
        """Copies published blocks to the host pool before they are evicted; only the last ones, if room is short."""
        # More blocks would evict each other from the host pool, with one more operation for each block used twice.
        blocks = blocks[max(0, len(blocks) - min(self.host.num_free, self._room.copies_left)) :]
        table, sources = self._pool.table, blocks.tolist()
        digests: list[bytes | None] = [*table.digests(sources)]
        tokens, parents = table.tokens(blocks), table.parents(blocks)
        found, fresh = self.host.keep(digests, tokens, parents, table.names(sources))
        self._room.copies.add(CopyKind.SWAP_OUT, [sources[at] for at in fresh], [found[at] for at in fresh])
        self._counters.written_back += len(fresh)
        self.host.release(found)

    # -- in

    def match(self, sequence: Seq, first: int, most: int) -> tuple[list[int], int]:
        """Host blocks, at most `most`, that hold the sequence's tokens from logical block `first` on without a gap, and
        the position after the last token held. At least one known token is left to compute.
        """
        size = self._pool.block_size
        end = limit = sequence.num_tokens - 1
        own = self._own(sequence)
        kept = [] if own is None else own.blocks
        if own is not None and first < len(kept) and kept[-1] != NO_BLOCK and own.num_computed % size:
            # The last block is partial, so no block follows it.
            end = min(end, own.num_computed)
        known = sequence.digests[: limit // size] if self._shared else []
        reads = sequence.request.command.identity.read
        blocks: list[int] = []
        by_digest: list[int] = []
        for place in range(first, min(first + most, -(-end // size))):
            block = kept[place] if place < len(kept) else NO_BLOCK
            if block == NO_BLOCK:
                if not reads or place >= len(known) or self.host.lookup(known[place]) is None:
                    break
                by_digest.append(place)
            elif place < len(known):
                # The sequence takes over the pool's digest object, which the blocks after this one follow.
                known[place] = sequence.digests[place] = self.host.key(block) or known[place]
            blocks.append(block)
        if by_digest:
            chunks = sequence.chunks(size, 0, by_digest[-1] + 1)[by_digest]
            parents = [known[place - 1] if place else sequence.request.root for place in by_digest]
            found = self.host.find([known[place] for place in by_digest], chunks, parents, hashed_anew=True)
            for place, block in zip(by_digest, found, strict=True):
                if block == NO_BLOCK:
                    del blocks[place - first :]
                    break
                blocks[place - first] = block
                sequence.digests[place] = self.host.key(block) or known[place]
        sequence.num_lent = max(sequence.num_lent, first + len(blocks))
        return blocks, min(end, (first + len(blocks)) * size)

    def swap_in(self, host_blocks: list[int], device_blocks: list[int]) -> None:
        """Lists copies of host blocks into as many device blocks."""
        self._room.copies.add(CopyKind.SWAP_IN, host_blocks, device_blocks)
        self._counters.swapped_in += len(host_blocks)

    def release(self, sequence: Seq, hits: Sequence[int] = (), first: int = 0) -> None:
        """Releases the host blocks kept for the sequence, and `hits`, those that `match` found from logical block
        `first` on and that are held for its admission. Contents with a digest stay cached while there is room.
        """
        own = self._own(sequence)
        kept = own.blocks if own is not None else []
        # The deepest first, so that it is evicted first: it is of no use without the blocks before it. Blocks kept for
        # the sequence among the hits become free as hits.
        for blocks in (kept[first:], hits, kept[:first]):
            if blocks:
                self.host.release([block for block in reversed(blocks) if block != NO_BLOCK])
        sequence.swapped = None

    def _own(self, sequence: Seq) -> Swapped | None:
        """Host blocks kept for the sequence; None if there are none in this epoch's pool."""
        swapped = sequence.swapped
        return swapped if swapped is not None and swapped.pool is self.host else None


MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class SwapPolicy:
    """`mode` is one of MODES. The executor measures the other figures; 0: not measured."""

    mode: str = "recompute"
    block_bytes: int = 0
    out_bytes_per_s: int = 0
    in_bytes_per_s: int = 0
    prefill_tokens_per_s: int = 0

    def swaps(self, blocks_out: int, blocks_in: int, tokens: int) -> bool:
        """Whether to swap a victim, copying `blocks_out` now and `blocks_in` later, rather than recompute `tokens`."""
        if self.mode != "auto":
            return self.mode == "swap"
        if not (self.out_bytes_per_s and self.in_bytes_per_s and self.prefill_tokens_per_s):
            return False
        copying_s = self.block_bytes * (blocks_out / self.out_bytes_per_s + blocks_in / self.in_bytes_per_s)
        return copying_s < tokens / self.prefill_tokens_per_s
