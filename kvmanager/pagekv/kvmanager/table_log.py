"""What enters and leaves the prefix table: told to watchers at every step border, and remembered once it is gone.

The pool calls `stored`, `removed` and `cleared` as it goes; the engine loop calls `border` whenever a step was planned
or committed, which is when the table is what it claims to be. Without watchers only removals cost anything: an entry in
a dictionary each.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagekv.common.errors import LimitExceeded
from pagekv.kvmanager.prefix_table import PrefixTable
from pagekv.kvmanager.removal_history import Removal, RemovalHistory
from pagekv.kvmanager.table_diff import TableDiff
from pagekv.kvmanager.table_snapshot import take_snapshot
from pagekv.kvmanager.table_watch import Diff, StoredBlock, TableWatch

MAX_WATCHES = 16


@dataclass(frozen=True, slots=True)
class RemovedAgo:
    """How long ago a digest left the table, and whether everything else left with it (`cleared`) or it was evicted."""

    cleared: bool
    steps: int
    seconds: float


class TableLog:
    """Implements `block_pool.TableLog` for one pool after another."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._history = RemovalHistory()
        self._clock = clock
        self._table: PrefixTable | None = None
        self._watches: list[TableWatch] = []
        # Block and parent digest of what entered since the last border. The tokens are read at the border.
        self._pending: TableDiff[tuple[int, bytes]] = TableDiff()
        self._step = 0
        # Of the removals since the last border.
        self._removal: Removal | None = None

    @property
    def watched(self) -> bool:
        """Whether anybody wants to know what enters the table."""
        return bool(self._watches)

    @property
    def num_watches(self) -> int:
        """Watchers."""
        return len(self._watches)

    def follow(self, table: PrefixTable) -> None:
        """From now on the log is that of this table, which is empty. What the one before held counts as cleared."""
        if self._table is not None and len(self._table):
            self.cleared()
        self._table = table

    def removed_ago(self, digest: bytes) -> RemovedAgo | None:
        """When a digest last left the table, if that is remembered; a digest that is back has left it, too."""
        removal = self._history.find(digest)
        if removal is None:
            return None
        return RemovedAgo(removal.cleared, self._step - removal.step, self._clock() - removal.at)

    # -- called by the pool

    def stored(self, block: int, digest: bytes, parent: bytes) -> None:
        """A block entered the table, after the block or chain root with the digest `parent`."""
        self._pending.store(digest, (block, parent))

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks were evicted."""
        if self._removal is None:
            self._removal = Removal(self._step, self._clock(), cleared=False)
        self._history.add(digests, self._removal)
        if self._watches:
            self._pending.remove(digests)

    def cleared(self) -> None:
        """Everything is about to leave the table."""
        if self._table is not None:
            self._history.add(self._table.newest_digests(), Removal(self._step, self._clock(), cleared=True))
        if self._watches:
            self._pending.clear()

    # -- called by the engine loop

    def border(self, step: int) -> None:
        """The table is consistent; `step` steps are completed. Watchers get what changed."""
        self._step = step
        self._removal = None
        if self._watches and self._pending:
            diff = self._resolve()
            for watch in list(self._watches):
                watch.push(diff)

    def _resolve(self) -> Diff:
        """The pending changes with the tokens of what entered, which is in the table now."""
        assert self._table is not None
        diff = Diff()
        diff.cleared = self._pending.cleared
        for digest, entered in self._pending.changes.items():
            if entered is None:
                diff.changes[digest] = None
            else:
                # Not the block that was told of: another copy may have its entry by now.
                block = self._table.lookup(digest)
                assert block is not None
                diff.changes[digest] = StoredBlock(entered[1], array("I", self._table.token_ids(block)))
        self._pending = TableDiff()
        return diff

    def watch(self) -> TableWatch:
        """A watch that begins with the table as it is. Raises LimitExceeded when there are too many."""
        if len(self._watches) >= MAX_WATCHES:
            raise LimitExceeded(f"{MAX_WATCHES} readers watch the prefix table, which is the most there can be")
        self.border(self._step)
        watch = TableWatch(iter(()) if self._table is None else take_snapshot(self._table), self._leave)
        self._watches.append(watch)
        return watch

    def _leave(self, watch: TableWatch) -> None:
        self._watches.remove(watch)
        if not self._watches:
            self._pending = TableDiff()

    def end_watches(self, error: Exception) -> None:
        """Ends every watch with an error for its reader."""
        for watch in list(self._watches):
            watch.fail(error)
