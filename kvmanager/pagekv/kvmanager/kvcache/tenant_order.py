"""Free blocks of several tenants that share a pool: which tenant's block is evicted next (DESIGN 5).

Every block that is held or cached belongs to the tenant for which it was allocated, whoever hits it. A tenant's
footprint is the number of its blocks. Free blocks without content belong to nobody and are taken first. After them, one
block at a time is taken from the tenant with the largest footprint / weight among tenants above their floor or, if
there is none, from the tenant that needs blocks, the taker. The blocks of each tenant are in the order of
`EvictionOrder`, with the tenant's share of the protected blocks. No clock is used, so equal histories evict equally.

A block that follows another tenant's block in its chain leaves the table with that block, whatever its owner's floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pagekv.kvmanager.kvcache.eviction_policy import Blocks, EvictionOrder, protected_depth
from pagekv.kvmanager.kvcache.eviction_quotas import eviction_quotas
from pagekv.kvmanager.kvcache.growing_queue import GrowingQueue, Positions

MAX_TENANT = 32_767
_NOBODY = -1


def fitted_floors(floors: Mapping[int, int], num_blocks: int) -> dict[int, int]:
    """The floors, all reduced in proportion if they exceed a pool of `num_blocks` blocks."""
    total = max(num_blocks, sum(floors.values()))
    return {number: floor * num_blocks // total for number, floor in floors.items()}


class _TenantBlocks(EvictionOrder):
    """The free cached blocks of one tenant."""

    def __init__(self, number: int, position: Positions, proven: NDArray[np.bool_]) -> None:
        self.share(0)
        self._probation = GrowingQueue(position, 2 * number + 1)
        self._protected = GrowingQueue(position, 2 * number + 2)
        self.proven = proven

    def share(self, capacity: int) -> None:
        """Sets how many blocks can be protected from now on."""
        self.capacity, self.depth = capacity, protected_depth(capacity)


class TenantOrder:
    """Free blocks of several tenants: 11 bytes per block, up to 16 more while free; some hundred bytes per tenant."""

    def __init__(self, order: EvictionOrder, published: NDArray[np.bool_]) -> None:
        """Takes over the blocks of `order`, which must not be used any more. Every block that is held or cached becomes
        tenant 0's. `published`: whether each block is in the prefix table; the table's column, read only.
        """
        self._published = published
        self._proven = order.proven
        self._num_protected = order.capacity
        num_blocks = len(published)
        self._position: Positions = np.full(num_blocks, -1, np.int64)
        self._owner = np.zeros(num_blocks, np.int16)
        self._blank = GrowingQueue(self._position, 0)
        self._orders: list[_TenantBlocks] = []
        # By tenant: blocks held and cached, the free ones among them, and the configured weights and floors.
        self._footprint = np.zeros(0, np.int64)
        self._cached = np.zeros(0, np.int64)
        self._weight = np.zeros(0)
        self._floor = np.zeros(0, np.int64)
        self._has_floors = False
        self._reach(0)
        self._footprint[0] = num_blocks
        self._num_cached = 0
        self.append(np.fromiter(order, np.int32, len(order)))

    def __len__(self) -> int:
        return len(self._blank) + self._num_cached

    def __iter__(self) -> Iterator[int]:
        """Blocks without content, then tenant by tenant in eviction order."""
        yield from self._blank
        for each in self._orders:
            yield from each

    # -- configuration

    def configure(self, weights: Mapping[int, float], floors: Mapping[int, int]) -> None:
        """Replaces all weights and floors, by tenant; the defaults are 1 and 0. Raises ValueError."""
        num_blocks = len(self._owner)
        for number, weight in weights.items():
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"weight of tenant {number}: must be above 0, got {weight}")
        for number, floor in floors.items():
            if floor < 0:
                raise ValueError(f"floor of tenant {number}: must be 0 blocks or more, got {floor}")
        if sum(floors.values()) > num_blocks:
            raise ValueError(f"floors: {sum(floors.values())} blocks together, the pool has {num_blocks}")
        numbers = [*weights, *floors]
        if numbers and min(numbers) < 0:
            raise ValueError(f"tenant {min(numbers)}: numbers begin at 0")
        self._reach(max(numbers, default=0))
        self._weight[:] = 1
        self._floor[:] = 0
        self._weight[[*weights]] = [*weights.values()]
        self._floor[[*floors]] = [*floors.values()]
        self._has_floors = bool(self._floor.any())

    def _reach(self, number: int) -> None:
        """Makes room for tenants up to this one."""
        more = number + 1 - len(self._orders)
        if more <= 0:
            return
        if number > MAX_TENANT:
            raise ValueError(f"tenant {number}: numbers end at {MAX_TENANT}")
        self._orders += [
            _TenantBlocks(each, self._position, self._proven) for each in range(len(self._orders), number + 1)
        ]
        self._footprint = np.append(self._footprint, np.zeros(more, np.int64))
        self._cached = np.append(self._cached, np.zeros(more, np.int64))
        self._weight = np.append(self._weight, np.ones(more))
        self._floor = np.append(self._floor, np.zeros(more, np.int64))

    # -- asking

    def footprint(self, tenant: int) -> int:
        return int(self._footprint[tenant]) if tenant < len(self._orders) else 0

    def owner(self, block: int) -> int | None:
        """The tenant of a block that is held or cached; None for others."""
        owner = int(self._owner[block])
        return None if owner == _NOBODY else owner

    def num_free_for(self, tenant: int, touched: Blocks) -> int:
        """Blocks that can be allocated for this tenant once the free blocks `touched`, none named twice, are held."""
        free = len(self) - len(touched)
        if not self._has_floors:
            return free
        cached, held = self._cached, self._footprint - self._cached
        if len(touched):
            counts = self._counts(touched)
            cached, held = cached - counts, held + counts
        protected = np.minimum(cached, np.maximum(self._floor - held, 0))
        own = int(protected[tenant]) if tenant < len(protected) else 0
        return free - int(protected.sum()) + own

    def most_for(self, tenant: int, held: Blocks) -> int:
        """Blocks that one request of this tenant can hold at most while others hold only `held`, whatever is cached."""
        counts = self._counts(held)
        taken = np.maximum(counts, self._floor)
        if tenant < len(taken):
            taken[tenant] = counts[tenant]
        return len(self._owner) - int(taken.sum())

    def floors_beside(self, tenant: int) -> int:
        """The sum of the floors of all other tenants."""
        return int(self._floor.sum()) - (int(self._floor[tenant]) if tenant < len(self._floor) else 0)

    def yields(self, tenant: int, taker: int) -> bool:
        """Whether the taker can get blocks that a request of `tenant` frees; else the tenant's floor keeps them."""
        # Freed blocks stay cached, in the footprint. A tenant that holds no more than its floor gives nothing by them.
        held = self._footprint[tenant] - self._cached[tenant]
        return tenant == taker or bool(held > self._floor[tenant])

    def _counts(self, blocks: Blocks) -> NDArray[np.int64]:
        """How many of these blocks, which have owners, each tenant has."""
        return np.bincount(self._owner[blocks], minlength=len(self._orders))

    # -- changing

    def take(self, count: int, tenant: int, *, over_floors: bool = False) -> Blocks:
        """Takes `count` blocks, the tenant's from now on; so many must be free. `over_floors`: even below floors."""
        self._reach(tenant)
        taken = [self._blank.pop(min(count, len(self._blank)))]
        left = count - len(taken[0])
        if left:
            floors = 0 if over_floors else self._floor
            # The taker counts with all its new blocks but one: so the result is the same as taking blocks one by one.
            footprint = self._footprint.copy()
            footprint[tenant] += count - 1
            # The taker loses its own blocks at or below its floor only if others have none above theirs.
            allowed = np.clip(footprint - floors, 0, self._cached)
            allowed[tenant] += max(0, left - int(allowed.sum()))
            quotas = eviction_quotas(left, footprint, self._weight, allowed, tenant)
            numbers = np.flatnonzero(quotas).tolist()
            taken += [self._orders[number].pop(int(quotas[number])) for number in numbers]
            self._footprint -= quotas
            self._cached -= quotas
            self._num_cached -= left
        blocks = taken[0] if len(taken) == 1 else np.concatenate(taken)
        self._owner[blocks] = tenant
        self._footprint[tenant] += count
        return blocks

    def append(self, blocks: Blocks) -> None:
        """Appends freed blocks, a chain's deepest first, to their owner's order. Blank blocks become nobody's."""
        published = self._published[blocks]
        blank = blocks[~published]
        if len(blank):
            self._footprint -= self._counts(blank)
            self._owner[blank] = _NOBODY
            self._proven[blank] = False
            self._blank.append(blank)
            blocks = blocks[published]
        if not len(blocks):
            return
        self._num_cached += len(blocks)
        counts = self._counts(blocks)
        self._cached += counts
        weights = self._sum_of_weights()
        for number, mine in self._divided(blocks, counts):
            self._order_of(number, weights).append(mine)

    def remove(self, blocks: Blocks) -> None:
        """Removes free cached blocks that are held again."""
        counts = self._counts(blocks)
        for number, mine in self._divided(blocks, counts):
            self._orders[number].remove(mine)
        self._cached -= counts
        self._num_cached -= len(blocks)

    def _divided(self, blocks: Blocks, counts: NDArray[np.int64]) -> Iterator[tuple[int, Blocks]]:
        """Yields each tenant with its blocks, in order; `counts` has their number by tenant."""
        numbers = np.flatnonzero(counts).tolist()
        if len(numbers) == 1:
            yield numbers[0], blocks
            return
        owners = self._owner[blocks]
        for number in numbers:
            yield number, blocks[owners == number]

    def hit(self, blocks: Blocks) -> None:
        """As in `EvictionOrder`, in the order of the tenant that owns the first block."""
        if len(blocks):
            # No block of the tenant may have been freed since weights changed, or ever.
            self._order_of(int(self._owner[blocks[0]]), self._sum_of_weights()).hit(blocks)

    def _sum_of_weights(self) -> float:
        """The sum of the weights of tenants that have blocks."""
        return float(self._weight[self._footprint > 0].sum())

    def _order_of(self, number: int, weights: float) -> _TenantBlocks:
        """A tenant's order, with its share of the protected blocks as it is now; `weights` from `_sum_of_weights`."""
        order = self._orders[number]
        order.share(int(self._num_protected * (float(self._weight[number]) / weights)))
        return order

    def invalidate(self, blocks: Blocks) -> None:
        """Notes that the content of these blocks, free or held, is void; free blocks become nobody's."""
        fallen = blocks[(self._position[blocks] >= 0) & (self._owner[blocks] != _NOBODY)]
        if len(fallen):
            self.remove(fallen)
            self._footprint -= self._counts(fallen)
            self._owner[fallen] = _NOBODY
            self._blank.append(fallen)
        self._proven[blocks] = False

    def supersede(self, blocks: Sequence[int], heirs: Sequence[int]) -> None:
        """Notes that the held blocks `heirs` take over the content of `blocks`; an heir of a proven block is proven."""
        if blocks:
            old = np.array(blocks, np.int32)
            self._proven[[heir for heir, proven in zip(heirs, self._proven[old], strict=True) if proven]] = True
            self.invalidate(old)
