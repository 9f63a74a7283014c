"""Visitors: tenants that were newcomers when they came, while they are there and for a few steps after."""

from __future__ import annotations

from collections.abc import Set

# Callers that wait for each answer ask again within one or two steps, those that do something with it a few later.
STEPS_BEHIND = 16
# A tenant that has been there for so many steps without a pause does not come and go.
MOST_STEPS = 1000


class Visitors:
    """Used by the scheduler alone. A caller that asks again when it has its answer does so when the next step has just
    begun, and waits for all of it. So steps are shorter while a visitor may do that (`StepBound.visited`).

    Newcomers have less than others. So many tenants that come and go alike do not make each other's steps short.
    """

    def __init__(self) -> None:
        self._present: Set[int] = frozenset()
        # By visitor: steps for which it is one, from now on.
        self._left: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._left)

    def see(self, present: Set[int], newcomers: Set[int]) -> None:
        """Tells tenants that have requests, and newcomers among them (`VirtualTokens.greet`); once a step."""
        came, gone = (present - self._present) & newcomers, self._present - present
        self._present = present
        left = {tenant: steps - 1 for tenant, steps in self._left.items() if steps > 1}
        left |= {tenant: min(left[tenant], STEPS_BEHIND) for tenant in gone & left.keys()}
        self._left = left | dict.fromkeys(came, MOST_STEPS)
