"""Two tiers: what leaves device blocks for the host pool, and what comes back (DESIGN 5, CHECKLIST I).

A preempted sequence's full blocks go to the host pool under their digests, unless they are there already or others hold
them on the device; its partial tail goes under no key. The sequences of one request go together, and what they share is
copied once. So coming back is a lookup, block by block: device hit, else host hit, else recompute. Blocks evicted from
the device can take the same way (write-back), and then serve as a second, larger prefix cache.

Every copy is one `Move`, in the order decided, ahead of all computing of its step. Steps are ordered too, so a device
block can be given away as soon as its move is listed, and a host block likewise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.block_pool import BlockPool
from pagekv.kvmanager.host_pool import NO_BLOCK, HostPool
from pagekv.kvmanager.prefix_table import Blocks
from pagekv.kvmanager.sequence import Sequence, Swapped
from pagekv.kvmanager.step_plan import Move, MoveKind


@dataclass(slots=True)
class SwapCounters:
    """Blocks copied, cumulative."""

    swapped_out: int = 0
    swapped_in: int = 0
    written_back: int = 0


class _Written(NamedTuple):
    """The logical block `place` of a sequence: the device block that holds it, and the position behind the last that is
    written. It is `elsewhere` where others hold it too and it can be found by its digest.
    """

    sequence: Sequence
    place: int
    block: int
    end: int
    elsewhere: bool


class Swapper:
    """Lists moves between the pools of one epoch."""

    def __init__(
        self, pool: BlockPool, host: HostPool, moves: list[Move], counters: SwapCounters, *, shared: bool
    ) -> None:
        """`moves` is where copies are listed, and the caller's. `shared`: contents are kept under their digests, for
        every sequence with the same prefix; else each for the sequence that held them.
        """
        self.host = host
        self._pool = pool
        self._moves = moves
        self._counters = counters
        self._shared = shared

    # -- out

    def cost(self, group: Iterable[Sequence]) -> tuple[int, int, int]:
        """What swapping these sequences would take: blocks to copy out now, blocks to copy in later, and the tokens
        that would have to be computed again instead. Blocks that others hold count for nothing, those that several of
        these hold count once.
        """
        out = back = tokens = 0
        seen: set[int] = set()
        for written in self._written(group):
            if not written.elsewhere and written.block not in seen:
                seen.add(written.block)
                out += self._kept(written) == NO_BLOCK
                back += 1
                tokens += written.end - written.place * self._pool.block_size
        return out, back, tokens

    def swap_out(self, group: Iterable[Sequence]) -> None:
        """Keeps what these sequences have computed, as far as the host pool has room, before their blocks are freed.
        What several of them hold is copied once, and all of them hold the copy.
        """
        kept: dict[Sequence, list[int]] = {}
        covered: dict[Sequence, int] = {}
        copies: dict[int, int] = {}
        full: set[Sequence] = set()
        for written in self._written(group):
            sequence, block = written.sequence, NO_BLOCK
            if sequence in full:
                continue
            if not written.elsewhere:
                block = copies.get(written.block, NO_BLOCK)
                if block != NO_BLOCK:
                    self.host.hold([block])
                else:
                    block = self._keep(written)
                if block == NO_BLOCK:
                    full.add(sequence)
                    continue
                copies[written.block] = block
            kept.setdefault(sequence, []).append(block)
            covered[sequence] = written.end
        for sequence, blocks in kept.items():
            if any(block != NO_BLOCK for block in blocks):
                sequence.swapped = Swapped(self.host, blocks, covered[sequence])

    def _written(self, group: Iterable[Sequence]) -> list[_Written]:
        """Every logical block of these sequences that holds something."""
        size, counts, table = self._pool.block_size, self._pool.ref_counts, self._pool.table
        sequences = list(group)
        inside = Counter(block for sequence in sequences for block in sequence.block_table)
        found = []
        for sequence in sequences:
            end = sequence.num_computed
            for index, block in enumerate(sequence.block_table[: -(-end // size)]):
                elsewhere = self._shared and counts[block] > inside[block] and table.digest(block) is not None
                found.append(_Written(sequence, index, block, min(end, (index + 1) * size), elsewhere))
        return found

    def _digest(self, written: _Written) -> bytes | None:
        """The key of a logical block; None: private."""
        sequence, place = written.sequence, written.place
        full = written.end == (place + 1) * self._pool.block_size
        shares = full and self._shared and sequence.publishes and place < len(sequence.digests)
        return sequence.digests[place] if shares else None

    def _tokens(self, written: _Written) -> NDArray[np.uint32]:
        chunks = written.sequence.chunks(self._pool.block_size, written.place, written.place + 1)
        tokens: NDArray[np.uint32] = chunks[0]
        return tokens

    def _kept(self, written: _Written) -> int:
        """Where the host pool has a logical block already."""
        digest = self._digest(written)
        return NO_BLOCK if digest is None else self.host.find(digest, self._tokens(written))

    def _keep(self, written: _Written) -> int:
        """A host block that holds the logical block once this step's moves are made, held; NO_BLOCK: no room."""
        block = self._kept(written)
        if block != NO_BLOCK:
            self.host.hold([block])
            return block
        digest, before = self._digest(written), b""
        if digest is not None:
            sequence, place = written.sequence, written.place
            before = sequence.digests[place - 1] if place else sequence.request.root
        block = self.host.take(digest, None if digest is None else self._tokens(written), before)
        if block != NO_BLOCK:
            self._moves.append(Move(MoveKind.SWAP_OUT, written.block, block))
            self._counters.swapped_out += 1
        return block

    def write_back(self, blocks: Blocks) -> None:
        """Keeps the contents of published device blocks that are about to be given away."""
        table = self._pool.table
        for device in blocks.tolist():
            digest, tokens = table.digest(device), np.array(table.token_ids(device), np.uint32)
            parent = table.parent(device)
            if digest is None or parent is None:
                continue
            block = self.host.find(digest, tokens)
            if block != NO_BLOCK:
                self.host.hold([block])  # used just now
            else:
                block = self.host.take(digest, tokens, parent)
                if block == NO_BLOCK:
                    return
                self._moves.append(Move(MoveKind.SWAP_OUT, device, block))
                self._counters.written_back += 1
            self.host.release([block])

    # -- in

    def match(self, sequence: Sequence, first: int) -> tuple[list[int], int]:
        """Host blocks that hold the sequence from logical block `first` on without a gap, and the position behind what
        they hold. At least one known token is left to compute.
        """
        size = self._pool.block_size
        limit = len(sequence.token_ids) - 1
        own = self._own(sequence)
        reads = self._shared and sequence.request.command.identity.read
        blocks: list[int] = []
        held = first * size
        for index in range(first, -(-limit // size)):
            end = min((index + 1) * size, limit)
            block = NO_BLOCK
            if own is not None and index < len(own.blocks):
                block = own.blocks[index]
                if block != NO_BLOCK:
                    end = min(end, own.num_computed)
            if block == NO_BLOCK and reads and end == (index + 1) * size and index < len(sequence.digests):
                block = self.host.find(sequence.digests[index], sequence.chunks(size, index, index + 1)[0])
            if block == NO_BLOCK or end <= held:
                break
            blocks.append(block)
            held = end
            if end < (index + 1) * size:
                break
        return blocks, held

    def swap_in(self, host_blocks: list[int], device_blocks: list[int]) -> None:
        """Lists the copies into device blocks, as many."""
        for source, destination in zip(host_blocks, device_blocks, strict=True):
            self._moves.append(Move(MoveKind.SWAP_IN, source, destination))
        self._counters.swapped_in += len(host_blocks)

    def drop(self, sequence: Sequence) -> None:
        """The sequence does not need what was kept for it any more. Under their digests the contents stay for others
        as long as there is room.
        """
        own = self._own(sequence)
        if own is not None:
            self.host.release(own.held())
        sequence.swapped = None

    def _own(self, sequence: Sequence) -> Swapped | None:
        """What was kept for the sequence, unless that was in the pool of another epoch."""
        swapped = sequence.swapped
        return swapped if swapped is not None and swapped.pool is self.host else None
