"""A log of the prefix tables of both tiers: watches get the changes at every step boundary, and digests that left the
device's table are remembered.

The tables have a revision, the same for every watch, which rises at each boundary with changes. The latest changes are
kept for readers that were cut off, also without a watch, until there are too many.

The pools call `stored`, `removed` and so on at every change. The engine loop calls `step_boundary` after each step that
it planned or committed, when the tables are consistent. Before the first watch, and long after the last one, only
removals from the device cost anything: a dictionary entry each.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pagekv.common.errors import InvalidRequest, Overloaded, RevisionGone
from pagekv.kvmanager.kvcache.events.batch import Diff, OptionalNames, Removed, Stored, Tier
from pagekv.kvmanager.kvcache.events.removal_history import Removal, RemovalHistory, RemovalNote
from pagekv.kvmanager.kvcache.events.snapshot import Snapshot, host_block, take_snapshot
from pagekv.kvmanager.kvcache.events.subscription import TableWatch
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.kvcache.prefix_table import BlockTokens, Names, PrefixTable

MAX_WATCHES = 16
# Seconds. A watch that is resumed may arrive before the broken one is noticed.
RETRY_DELAY_S = 1.0
# Changes that are kept for readers that come back: some tens of megabytes, and fewer than a watch may leave unread.
MAX_HELD = 65_536


class TableLog:
    """The log of the pools of all epochs. Digests are 32 bytes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = RemovalHistory()
        self._clock = clock
        self._table: PrefixTable | None = None
        self._host: HostPool | None = None
        self._watches: list[TableWatch] = []
        # Whether changes are noted: there are watches, or readers of former watches may come back.
        self.watched = False
        # Revision of the tables at the latest boundary, while changes are noted.
        self._revision = 0
        # The changes that led to this revision, oldest first, and their number.
        self._held: deque[Diff] = deque()
        self._held_size = 0
        # Changes since the latest step boundary.
        self._pending = Diff()
        self._step = 0
        # Shared by the removals since the latest step boundary.
        self._removal: Removal | None = None

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    def attach(self, table: PrefixTable, host: HostPool | None = None) -> None:
        """Makes this the log of a new, empty table and host pool. The content of the former ones counts as cleared."""
        if (self._table is not None and len(self._table)) or (self._host is not None and self._host.num_cached):
            self.cleared()
        self._table = table
        self._host = host
        self._history.size_for(len(table.published))

    def removed_ago(self, digest: bytes) -> Removal | None:
        """How long ago a digest last left the table, even if it is back by now; None if that is not remembered."""
        note = self._table.map.note(digest) if self._table is not None else None
        removal = note.removal if isinstance(note, RemovalNote) else self._history.find(digest)
        if removal is None:
            return None
        return Removal(removal.cleared, self._step - removal.steps, self._clock() - removal.seconds)

    # -- called by the pool

    def stored(
        self,
        digests: Sequence[bytes],
        parents: Sequence[bytes],
        tokens: BlockTokens,
        *,
        text: bool,
        first: bool,
        names: OptionalNames = None,
    ) -> None:
        """Blocks entered the device's table, each after the block or chain root with the digest at its position in
        `parents`; `text`: no block has media; `first`: the first block, and no other, follows a chain root;
        `names` as in `Stored`.
        """
        if digests:
            self._pending.store(Stored(Tier.DEVICE, digests, parents, tokens.tobytes(), text, first, names))

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks were evicted from the device: remembers them, and tells watches."""
        self.removal_note()(digests)
        if self.watched:
            self.left(digests)

    def removal_note(self) -> RemovalNote:
        """A note that remembers digests, given to it now or later, as evicted now."""
        if self._removal is None:
            self._removal = Removal(False, self._step, self._clock())
        return RemovalNote(self._history, self._removal)

    def left(self, digests: Sequence[bytes]) -> None:
        """Tells watches of blocks that were evicted from the device, and that their note remembers."""
        self._pending.remove(Removed(Tier.DEVICE, digests))

    def host_stored(self, digest: bytes, parent: bytes, tokens: NDArray[np.uint32], names: Names | None = None) -> None:
        """A block entered the host's table. Unlike on the device, its parent may be missing."""
        if self.watched:
            self._pending.store(host_block(digest, parent, tokens, names))

    def host_removed(self, digest: bytes) -> None:
        if self.watched:
            self._pending.remove(Removed(Tier.HOST, [digest]))

    def cleared(self) -> None:
        """Everything is about to leave the tables of both tiers, or has left the host's already."""
        if self._table is not None:
            self._table.map.settle()
            self._history.add(self._table.map.newest(), Removal(True, self._step, self._clock()))
        if self.watched:
            self._pending.clear()

    # -- called by the engine loop

    def step_boundary(self, step: int) -> None:
        """The tables are consistent, and `step` steps are completed. Watches receive the changes."""
        self._step = step
        self._removal = None
        if self._pending.size:
            diff, self._pending = self._pending, Diff()
            self._revision += 1
            self._hold(diff)
            for watch in list(self._watches):
                watch.push(diff, self._revision)

    def _hold(self, diff: Diff) -> None:
        self._held.append(diff)
        self._held_size += diff.size
        while self._held_size > MAX_HELD:
            self._held_size -= self._held.popleft().size
            if not self._watches:
                # All readers have been away for long.
                self.watched, self._held_size = False, 0
                self._held.clear()

    def watch(self, start_revision: int = 0) -> TableWatch:
        """A watch that begins with the tables as they are, or with the changes after `start_revision`. Raises
        Overloaded when there are too many watches, RevisionGone when the changes are no longer held, InvalidRequest
        for a revision that the tables never had.
        """
        if len(self._watches) >= MAX_WATCHES:
            words = f"{MAX_WATCHES} readers watch the prefix table, the most possible; end one"
            raise Overloaded(words, RETRY_DELAY_S, MAX_WATCHES)
        self.step_boundary(self._step)
        if start_revision > self._revision:
            raise InvalidRequest("start_revision", f"must be at most {self._revision}, got {start_revision}")
        missed = self._revision - start_revision
        if start_revision and (not self.watched or missed > len(self._held)):
            raise RevisionGone(f"the changes after revision {start_revision} are no longer held; watch from a snapshot")
        if not self.watched:
            # Changes since the latest revision were not noted.
            self.watched, self._revision = True, self._revision + 1
        snapshot: Snapshot = iter(())
        if not start_revision and self._table is not None:
            snapshot = take_snapshot(self._table, self._host)
        watch = TableWatch(snapshot, self._watches.remove, start_revision or self._revision)
        self._watches.append(watch)
        if start_revision:
            for revision, diff in enumerate(islice(self._held, len(self._held) - missed, None), start_revision + 1):
                watch.push(diff, revision)
        return watch

    def end_watches(self, error: Exception) -> None:
        for watch in list(self._watches):
            watch.fail(error)
