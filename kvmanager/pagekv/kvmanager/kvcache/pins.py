"""Pins: leases on cached prefixes. A pin holds blocks as a sequence does, so they cannot be evicted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagekv.common.errors import AlreadyExists, LimitExceeded
from pagekv.kvmanager.kvcache.block_hash import CacheIdentity
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.prefix_table import Blocks

MAX_PINS = 4096
MIN_LEASE_S, MAX_LEASE_S = 1, 86_400


@dataclass(frozen=True, slots=True)
class PinLease:
    """One lease, which ends at `expires_at` (seconds of the clock) at the latest."""

    pin_id: str
    blocks: Blocks
    expires_at: float
    # The identity whose prefix it keeps.
    identity: CacheIdentity
    # The tenant that it was made for, which an identity in a shared namespace does not name; "" without tenants.
    owner: str


def _names(identity: CacheIdentity) -> tuple[str, str, str]:
    return identity.tenant, identity.namespace, identity.adapter_id


def _ignore(blocks: Blocks) -> None:
    pass


class Pins:
    """The pins of one pool. Pins never take blocks that a live request may still need, so every request can finish. A
    pin is found by owner and id, because tenants may use the same ids.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_share: float,
        clock: Callable[[], float] = time.monotonic,
        pinned: Callable[[Blocks], None] = _ignore,
        unpinned: Callable[[Blocks], None] = _ignore,
    ) -> None:
        """At most the share `max_share`, 0 to 1, of the pool is pinned; `clock` gives seconds. `pinned` and `unpinned`
        are called with the blocks of each pin that begins or ends.
        """
        self._pool = pool
        self._pinned = pinned
        self._unpinned = unpinned
        self._max_share = max_share
        self._clock = clock
        # By owner and id.
        self._pins: dict[tuple[str, str], PinLease] = {}
        # Pins that hold each block, [num_blocks]. Others only read it.
        self.holders = np.zeros(pool.num_blocks, np.int32)
        # Blocks held by at least one pin.
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def next_expiry(self) -> float | None:
        """When to call `expire` next, in seconds of the clock. None: never."""
        return min((pin.expires_at for pin in self._pins.values()), default=None)

    def leases(self, owner: str | None = None) -> list[PinLease]:
        """The pins of an owner, or with None of all owners, in order of expiry."""
        found = (pin for pin in self._pins.values() if owner in (None, pin.owner))
        return sorted(found, key=lambda pin: (pin.expires_at, pin.pin_id, pin.owner))

    def check_id(self, pin_id: str, identity: CacheIdentity, owner: str) -> None:
        """Raises AlreadyExists if this owner has a pin of the id in another namespace or of another adapter."""
        old = self._pins.get((owner, pin_id))
        if old is not None and _names(old.identity) != _names(identity):
            words = f"must not be that of a pin in another namespace or of another adapter, got {pin_id!r}"
            raise AlreadyExists("pin_id", words, "pin", pin_id)

    def pin(
        self,
        blocks: Sequence[int] | Blocks,
        lease_s: float,
        largest_need: int,
        pin_id: str = "",
        identity: CacheIdentity = CacheIdentity(),  # noqa: B008 - immutable
        owner: str = "",
    ) -> PinLease:
        """Holds cached blocks for `lease_s` seconds. The owner's pin of this id, if any, then holds these blocks
        instead of its former ones.

        Without an id one is made. `largest_need`: the blocks that the largest live request may come to need, plus those
        that floors keep beside it. Raises, with nothing changed, AlreadyExists as `check_id` does, and LimitExceeded if
        there are too many pins, if they would exceed the share, or if that request could no longer finish.
        """
        self.check_id(pin_id, identity, owner)
        old = self._pins.get((owner, pin_id))
        if old is None and len(self._pins) >= MAX_PINS:
            words = f"there are {MAX_PINS} pins, the most possible; unpin one"
            raise LimitExceeded(words, limit=MAX_PINS)
        held = np.array(blocks, np.int32)
        taken = int(np.count_nonzero(self.holders[held] == 0))
        let_go = 0
        if old is not None:
            alone = old.blocks[self.holders[old.blocks] == 1]
            let_go = len(alone) - int(np.isin(alone, held).sum())
        pinned = self.num_blocks + taken - let_go
        total = self._pool.num_blocks
        allowed = int(total * self._max_share)
        if pinned > allowed:
            raise LimitExceeded(
                f"with this prefix {pinned} blocks would be pinned; at most {allowed} of {total} may be "
                f"(--max-pinned-share {self._max_share:g})",
                needed_blocks=taken,
                available_blocks=allowed - self.num_blocks + let_go,
                pinned_blocks=self.num_blocks,
                limit=allowed,
                flag="--max-pinned-share",
            )
        if pinned > total - largest_need:
            raise LimitExceeded(
                f"with this prefix {pinned} of {total} blocks would be pinned, and a live request may need "
                f"{largest_need}",
                needed_blocks=taken,
                available_blocks=max(0, total - largest_need - self.num_blocks + let_go),
                pinned_blocks=self.num_blocks,
            )
        # Told before anything changes, so that a recording that ends in an error includes it.
        self._pinned(held)
        self._pool.share(held)
        self.holders[held] += 1
        self.num_blocks += taken
        # The old pin ends after the new blocks are held, so that blocks of both are never free in between.
        if old is not None:
            self._end(old)
        pin_id = pin_id or f"pin-{secrets.token_hex(8)}"
        lease = self._pins[owner, pin_id] = PinLease(pin_id, held, self._clock() + lease_s, identity, owner)
        return lease

    def unpin(self, pin_id: str, owner: str | None = None) -> int:
        """Ends the pins of this id, of one owner or, with None, of all; returns how many blocks they held."""
        ending = [pin for pin in self.leases(owner) if pin.pin_id == pin_id]
        return sum(map(self._end, ending))

    def _end(self, pin: PinLease) -> int:
        """Ends a pin; returns how many blocks it held."""
        del self._pins[pin.owner, pin.pin_id]
        self._unpinned(pin.blocks)
        self._pool.free(pin.blocks)
        self.holders[pin.blocks] -= 1
        self.num_blocks -= int(np.count_nonzero(self.holders[pin.blocks] == 0))
        return len(pin.blocks)

    def expire(self) -> int:
        """Ends every pin whose lease is over, the earliest first; returns how many."""
        now = self._clock()
        over = [pin for pin in self.leases() if pin.expires_at <= now]
        for pin in over:
            self._end(pin)
        return len(over)

    def end_all(self) -> int:
        """Ends every pin; returns how many."""
        ended = list(self._pins.values())
        for pin in ended:
            self._end(pin)
        return len(ended)
