"""Two tiers: what leaves device blocks for the host pool, and what comes back (DESIGN 5, CHECKLIST I).

A preempted sequence's full blocks go to the host pool under their digests, unless they are there already or others hold
them on the device; its partial tail goes under no key. So coming back is a lookup, block by block: device hit, else
host hit, else recompute. Blocks evicted from the device can take the same way (write-back), and then serve as a second,
larger prefix cache.

Every copy is one `Move`, in the order decided, ahead of all computing of its step. Steps are ordered too, so a device
block can be given away as soon as its move is listed, and a host block likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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

    def cost(self, sequence: Sequence) -> tuple[int, int, int]:
        """What swapping a sequence would take: blocks to copy out now, blocks to copy in later, and the tokens that
        would have to be computed again instead. Blocks that others hold count for nothing.
        """
        out = back = tokens = 0
        for index, end, elsewhere in self._written(sequence):
            if not elsewhere:
                out += self._kept(sequence, index, end) == NO_BLOCK
                back += 1
                tokens += end - index * self._pool.block_size
        return out, back, tokens

    def swap_out(self, sequence: Sequence) -> None:
        """Keeps what a sequence has computed, as far as the host pool has room, before its blocks are freed."""
        blocks: list[int] = []
        covered = 0
        for index, end, elsewhere in self._written(sequence):
            block = NO_BLOCK
            if not elsewhere:
                block = self._keep(sequence, index, end)
                if block == NO_BLOCK:
                    break
            blocks.append(block)
            covered = end
        if any(block != NO_BLOCK for block in blocks):
            sequence.swapped = Swapped(self.host, blocks, covered)

    def _written(self, sequence: Sequence) -> list[tuple[int, int, bool]]:
        """Of each logical block that holds something: its index, the position behind the last that is written, and
        whether others hold it too, and it can be found by its digest.
        """
        size = self._pool.block_size
        end = sequence.num_computed
        counts = self._pool.ref_counts
        found = []
        for index, block in enumerate(sequence.block_table[: -(-end // size)]):
            elsewhere = self._shared and counts[block] > 1 and self._pool.table.digest(block) is not None
            found.append((index, min(end, (index + 1) * size), elsewhere))
        return found

    def _digest(self, sequence: Sequence, index: int, end: int) -> bytes | None:
        """The key of a logical block that is written up to position `end`; None: private."""
        full = end == (index + 1) * self._pool.block_size
        shares = full and self._shared and sequence.publishes and index < len(sequence.digests)
        return sequence.digests[index] if shares else None

    def _kept(self, sequence: Sequence, index: int, end: int) -> int:
        """Where the host pool has a logical block already."""
        digest = self._digest(sequence, index, end)
        if digest is None:
            return NO_BLOCK
        return self.host.find(digest, sequence.chunks(self._pool.block_size, index, index + 1)[0])

    def _keep(self, sequence: Sequence, index: int, end: int) -> int:
        """A host block that holds the logical block once this step's moves are made, held; NO_BLOCK: no room."""
        block = self._kept(sequence, index, end)
        if block != NO_BLOCK:
            self.host.hold([block])
            return block
        digest, before = self._digest(sequence, index, end), b""
        if digest is not None:
            before = sequence.digests[index - 1] if index else sequence.request.root
        tokens = sequence.chunks(self._pool.block_size, index, index + 1)[0] if digest is not None else None
        block = self.host.take(digest, tokens, before)
        if block != NO_BLOCK:
            self._moves.append(Move(MoveKind.SWAP_OUT, sequence.block_table[index], block))
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
