"""Fairness among tenants: weighted virtual token counters (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024, algorithms 2 and 4).

A tenant's counter is the cost of the tokens that it was served, divided by its weight. Its place is its counter, less a
credit while it is a newcomer. The waiting tenant with the lowest place is served next. When a tenant comes back, its
counter is lifted to the lowest place of the waiting tenants: so idle time gives no credit, and a tenant that comes does
not wait for the credit of others. A counter is never lowered, so a burst is paid for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import numpy as np
from numpy.typing import NDArray

# Prompt tokens are computed many at a time, an output token in a pass of its own (section 4.1 of the paper: 1 and 2).
INPUT_COST = 1.0
OUTPUT_COST = 2.0


class VirtualTokens:
    """The counters, by a tenant's number. With one tenant nothing is counted.

    While two tenants of weight 1 wait without a pause, their services differ by at most 2 max(INPUT_COST * P,
    OUTPUT_COST * M) + 2 K (theorem 4.4 of the paper). P is the tokens of the longest prompt, M the tokens that running
    sequences may have, that is the slots of the pool, and K a newcomer's credit. With other weights each tenant's
    service is divided by its weight, and P and M by the lower weight. Tokens found in the prefix cache or recomputed
    after a preemption are not counted.
    """

    def __init__(self) -> None:
        self._counters = np.zeros(1)
        # Weights by tenant. Not to be changed by others.
        self.weights = np.ones(1)
        # Output tokens of each tenant in all, [number].
        self.outputs = np.zeros(1, np.int64)
        # Counter and place, at that time, of the latest tenant whose last waiting sequence left the queue.
        self._left = 0.0, 0.0
        # The highest value so far of the lowest counter among waiting tenants, taken whenever a tenant joins. No tenant
        # joins more than a credit below it: else each newcomer, lifted to the place of the one before, would start
        # lower.
        self._level = 0.0
        # Whether there is more than one tenant.
        self.several = False
        # Tenants with less than their share of the running sequences, and the credit by which their places are lowered.
        self.newcomers: frozenset[int] = frozenset()
        self.credit = 0.0
        # By tenant: its credit, the tokens of its longest prompt so far, and whether it may be served next: a sequence
        # of it waits, and no cap holds it back.
        self._credits = np.zeros(1)
        self._longest = np.zeros(1, np.int64)
        self._waiting = np.zeros(1, np.bool_)

    def know(self, tenant: int, weight: float = 1.0) -> None:
        """Gives a tenant its weight, above 0; from then on its tokens are counted."""
        if tenant >= len(self._counters):
            more = 2 * tenant - len(self._counters)
            self._counters = np.append(self._counters, np.zeros(more))
            self.weights = np.append(self.weights, np.ones(more))
            self.outputs = np.append(self.outputs, np.zeros(more, np.int64))
            self._credits = np.append(self._credits, np.zeros(more))
            self._longest = np.append(self._longest, np.zeros(more, np.int64))
            self._waiting = np.append(self._waiting, np.zeros(more, np.bool_))
        self.weights[tenant] = weight
        self.several = self.several or tenant > 0

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Replaces all weights; tenants that are not named have weight 1."""
        self.weights[:] = 1
        for tenant, weight in weights.items():
            self.know(tenant, weight)

    def of(self, tenant: int) -> float:
        """A tenant's counter."""
        return float(self._counters[tenant]) if tenant < len(self._counters) else 0.0

    def weight(self, tenant: int) -> float:
        return float(self.weights[tenant]) if tenant < len(self.weights) else 1.0

    def greet(self, running: Mapping[int, int], waiting: Set[int], credit: float) -> None:
        """Determines the newcomers: tenants that wait or run and that, with one more sequence, would still have less
        than an equal share of the running sequences, for their weights. A newcomer's place is lowered by `credit` or,
        if that is more, by the longest prompt of any newcomer over its weight, so that its prompt does not stop halfway
        for prompts of others. All newcomers have the same credit, so that none waits for a long prompt that another one
        once sent.

        The share counts sequences, not blocks as preemption does: newcomers get step time, and each sequence takes
        equally much of it whatever it holds. So a tenant with long prompts and short answers stays a newcomer for good;
        others decode beside it in the turns that `StepShare` leaves them.
        """
        present, counts = np.zeros(len(self.weights), np.bool_), np.zeros(len(self.weights))
        present[[*running, *waiting]] = True
        counts[[*running]] = [*running.values()]
        few = np.flatnonzero(present & ((counts + 1) / self.weights < counts.sum() / self.weights[present].sum()))
        self.welcome_nobody()
        if len(few):
            self.newcomers = frozenset(few.tolist())
            self.credit = max(credit, float((INPUT_COST * self._longest[few] / self.weights[few]).max()))
            self._credits[few] = self.credit

    def welcome_nobody(self) -> None:
        self.newcomers, self.credit = frozenset(), 0.0
        self._credits[:] = 0

    def place(self, tenant: int) -> float:
        """A tenant's place in the order of service, lowest first: its counter, less the credit of a newcomer."""
        return self.of(tenant) - (self.credit if tenant in self.newcomers else 0.0)

    def goes_before(self, tenant: int, other: int) -> bool:
        """Whether a request of this tenant goes before prefills under way of the tenant `other`."""
        return tenant != other and self.place(tenant) <= self.place(other)

    def next(self) -> list[int]:
        """The tenants with the lowest place, among those that may be served; an empty list if there are none."""
        places = np.where(self._waiting, self._counters - self._credits, np.inf)
        least = places.min()
        return (places == least).nonzero()[0].tolist() if least < np.inf else []

    def joined(self, tenant: int) -> None:
        """Notes that a tenant has come back, or is no longer held back, so that it may be served; lifts its counter."""
        if tenant > 0 and tenant >= len(self._counters):
            self.know(tenant)
        self._waiting[tenant] = False
        if self.several:
            counters, (counter, place) = self._counters[self._waiting], self._left
            if len(counters):
                counter, place = float(counters.min()), float((counters - self._credits[self._waiting]).min())
            self._level = max(self._level, counter)
            self._counters[tenant] = max(self._counters[tenant], place, self._level - self.credit)
        self._waiting[tenant] = True

    def allow(self, tenants: Collection[int], may: bool) -> None:
        """Sets whether these tenants, which have waiting sequences, may be served."""
        self._waiting[[*tenants]] = may

    def left(self, tenant: int) -> None:
        """Notes that no sequence of a tenant waits any more."""
        self._waiting[tenant] = False
        if self.several:
            self._left = self.of(tenant), self.place(tenant)

    def sent(self, tenant: int, prompt_tokens: int) -> None:
        """Notes the length of a prompt that a tenant has sent."""
        if self.several:
            self._longest[tenant] = max(prompt_tokens, self._longest[tenant])

    def charge_prompt(self, tenant: int, tokens: int) -> None:
        """Charges a tenant for prompt tokens that are computed for the first time."""
        if self.several:
            self._counters[tenant] += INPUT_COST * tokens / self.weights[tenant]

    def charge_output(self, tenant: int, tokens: int) -> None:
        """Charges a tenant for output tokens."""
        if self.several:
            self._counters[tenant] += OUTPUT_COST * tokens / self.weights[tenant]
            self.outputs[tenant] += tokens

    def charge_outputs(self, tenants: NDArray[np.int32]) -> None:
        """Charges one output token for each entry, [n]: each tenant is named once for each of its sampled tokens."""
        counts = np.bincount(tenants, minlength=len(self._counters))
        self._counters += OUTPUT_COST * counts / self.weights
        self.outputs += counts
