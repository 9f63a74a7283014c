"""Visitors: tenants that were newcomers when they came, while they have requests and for a few steps longer."""

from __future__ import annotations

from collections.abc import Set

# Callers that wait for each answer ask again within one or two steps, or a few later if they process the answer first.
STEPS_BEHIND = 16
# A tenant that stays for so many steps without a pause is no visitor any more: it does not come and go.
MOST_STEPS = 1000


class Visitors:
    """Used by the scheduler alone. A caller that asks again as soon as it has its answer does so when the next step has
    just begun, and waits for the whole of that step. So steps are shorter while a visitor may do that
    (`StepBound.visited`).

    Only newcomers, which have less than their share, become visitors. So many tenants that all come and go alike do not
    make each other's steps short.
    """

    def __init__(self) -> None:
        self._present: Set[int] = frozenset()
        # By visitor: for how many more steps it is one.
        self._left: dict[int, int] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._left)

    def see(self, present: Set[int], newcomers: Set[int]) -> None:
        """Takes in the tenants with requests, and the newcomers (`VirtualTokens.greet`); to be called once per step."""
        came, gone = (present - self._present) & newcomers, self._present - present
        self._present = present
        left = {tenant: steps - 1 for tenant, steps in self._left.items() if steps > 1}
        left |= {tenant: min(left[tenant], STEPS_BEHIND) for tenant in gone & left.keys()}
        self._left = left | dict.fromkeys(came, MOST_STEPS)
