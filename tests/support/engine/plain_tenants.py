"""The rule by which tenants lose blocks, block by block on plain lists, to judge `TenantOrder` by."""

from __future__ import annotations

from support.engine.plain_lists import PlainLists


class PlainTenants:
    """`TenantOrder` over blocks all of which are free and nobody's; `protected`: protected ones at most, of all."""

    def __init__(self, num_blocks: int, protected: int) -> None:
        self.protected = protected
        self.blank = list(range(num_blocks))
        # Of blocks that are held or cached.
        self.owner: dict[int, int] = {}
        self.lists: dict[int, PlainLists] = {}
        self.proven: set[int] = set()
        self.weights: dict[int, float] = {}
        self.floors: dict[int, int] = {}

    def footprint(self, tenant: int) -> int:
        return sum(owner == tenant for owner in self.owner.values())

    def cached(self, tenant: int) -> list[int]:
        """In eviction order."""
        mine = self.lists.get(tenant)
        return mine.probation + mine.protected if mine is not None else []

    def victim(self, taker: int) -> int | None:
        """The tenant that loses the next block to this one."""

        candidates = [t for t in self.lists if self.cached(t) and self.footprint(t) > self.floors.get(t, 0)]
        return min(
            candidates,
            key=lambda t: (-(self.footprint(t) / self.weights.get(t, 1.0)), t != taker, t),
            default=taker if self.cached(taker) else None,
        )

    def take(self, count: int, taker: int) -> list[int] | None:
        """None, and nothing taken, where not so many can be had."""
        before = self.blank[:], dict(self.owner), {t: (x.probation[:], x.protected[:]) for t, x in self.lists.items()}
        proven = set(self.proven)
        taken: list[int] = []
        for _ in range(count):
            if self.blank:
                block = self.blank.pop(0)
            else:
                victim = self.victim(taker)
                if victim is None:
                    self.blank, self.owner = before[0], before[1]
                    for tenant, (probation, protected) in before[2].items():
                        self.lists[tenant].probation, self.lists[tenant].protected = probation, protected
                    self.proven.clear()
                    self.proven |= proven
                    return None
                (block,) = self.lists[victim].pop(1)
            self.owner[block] = taker
            taken.append(block)
        return taken

    def append(self, blocks: list[int], published: set[int]) -> None:
        for block in blocks:
            if block not in published:
                del self.owner[block]
                self.proven.discard(block)
                self.blank.append(block)
        for tenant in sorted({self.owner[block] for block in blocks if block in published}):
            mine = self.shared(tenant)
            mine.append([block for block in blocks if block in published and self.owner[block] == tenant])

    def shared(self, tenant: int) -> PlainLists:
        """A tenant's lists, with its share of the protected blocks."""
        total = sum(self.weights.get(owner, 1.0) for owner in set(self.owner.values()))
        mine = self.lists.setdefault(tenant, PlainLists(0, 0, 0))
        mine.proven = self.proven
        mine.capacity = int(self.protected * (self.weights.get(tenant, 1.0) / total))
        mine.depth = min(mine.capacity, max(1, mine.capacity // 8))
        return mine

    def remove(self, blocks: list[int]) -> None:
        for block in blocks:
            self.lists[self.owner[block]].remove([block])

    def hit(self, blocks: list[int]) -> None:
        if blocks:
            self.shared(self.owner[blocks[0]]).hit(blocks)

    def invalidate(self, blocks: list[int]) -> None:
        for block in blocks:
            tenant = self.owner.get(block)
            if tenant is not None and block in self.cached(tenant):
                self.lists[tenant].remove([block])
                del self.owner[block]
                self.blank.append(block)
        self.proven -= set(blocks)

    def supersede(self, blocks: list[int], heirs: list[int]) -> None:
        self.proven |= {heir for block, heir in zip(blocks, heirs, strict=True) if block in self.proven}
        self.invalidate(blocks)
