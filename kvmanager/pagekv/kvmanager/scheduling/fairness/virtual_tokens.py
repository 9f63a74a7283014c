"""Fairness among tenants: weighted virtual token counters (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024, algorithms 2 and 4).

A tenant's counter has the tokens that it was served, divided by its weight; its place is the same, less a credit while
it is a newcomer. The waiting tenant with the lowest place is served next. A tenant that comes back is lifted to the
lowest place of those that wait: so an idle time is no credit, and nobody who comes waits for the credit of others. A
counter is lowered never, so a burst is paid for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import numpy as np
from numpy.typing import NDArray

# Tokens of a prompt are computed many at a time. An output token costs a pass of its own (section 4.1 there: 1 and 2).
INPUT_COST = 1.0
OUTPUT_COST = 2.0


class VirtualTokens:
    """The counters, by a tenant's number. With one tenant nothing is counted.

    While two tenants of weight 1 wait without a pause, what they are served differs by 2 max(INPUT_COST * P,
    OUTPUT_COST * M) + 2 K at most (theorem 4.4 there), P being the tokens of the longest prompt, M those that running
    sequences may have, the slots of the pool, and K a newcomer's credit. With other weights what each is served is
    divided by its weight, and P and M by the lower one. Tokens found in the prefix cache are not counted, nor those
    computed again after a preemption.
    """

    def __init__(self) -> None:
        self._counters = np.zeros(1)
        # By tenant. Not to be changed by others.
        self.weights = np.ones(1)
        # Output tokens of each tenant in all, [number].
        self.outputs = np.zeros(1, np.int64)
        # Counter and place of the last tenant that had nothing waiting any more, at that time.
        self._left = 0.0, 0.0
        # The highest of the lowest counters that those that wait had whenever somebody came. Nobody comes more than a
        # credit below it: else each newcomer, lifted to the place of the one before, would come a credit lower.
        self._level = 0.0
        # Whether there is more than one tenant.
        self.several = False
        # Tenants that have less than their share of what runs, and the tokens by which these may come early.
        self.newcomers: frozenset[int] = frozenset()
        self.credit = 0.0
        # By tenant: the credit of newcomers, tokens of the longest prompt sent, and whether it may be served next:
        # something of it waits, and no cap holds it back.
        self._credits = np.zeros(1)
        self._longest = np.zeros(1, np.int64)
        self._waiting = np.zeros(1, np.bool_)

    def know(self, tenant: int, weight: float = 1.0) -> None:
        """Gives a tenant its weight, above 0; from then on it is counted."""
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
        """Weights instead of all that were set before; 1 where there is none."""
        self.weights[:] = 1
        for tenant, weight in weights.items():
            self.know(tenant, weight)

    def of(self, tenant: int) -> float:
        """A tenant's counter."""
        return float(self._counters[tenant]) if tenant < len(self._counters) else 0.0

    def weight(self, tenant: int) -> float:
        return float(self.weights[tenant]) if tenant < len(self.weights) else 1.0

    def greet(self, running: Mapping[int, int], waiting: Set[int], credit: float) -> None:
        """Tells newcomers: tenants that wait or run and that, with one sequence more, would have less than an equal
        share of those that run, for their weights. Newcomers are served as if they had had fewer tokens: `credit`, or
        the longest prompt of any of them over its weight, if that is more, so that no prompt stops halfway for those of
        others. All have the same credit, so that no newcomer waits for what another one once sent.

        Sequences count, and not blocks as for preemption: newcomers are given time of steps, of which each sequence
        takes as much whatever it holds. So a tenant of long prompts and short answers stays a newcomer for good; others
        decode beside it in the turns that `StepShare` leaves them.
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
        """The order in which tenants are served: their counters, a newcomer's less its credit."""
        return self.of(tenant) - (self.credit if tenant in self.newcomers else 0.0)

    def goes_before(self, tenant: int, other: int) -> bool:
        """Whether another tenant's request goes before what is under way of this `other`."""
        return tenant != other and self.place(tenant) <= self.place(other)

    def next(self) -> list[int]:
        """Tenants that were served least, of those that may be served; none where there are none."""
        places = np.where(self._waiting, self._counters - self._credits, np.inf)
        least = places.min()
        return (places == least).nonzero()[0].tolist() if least < np.inf else []

    def joined(self, tenant: int) -> None:
        """A tenant may be served of which nothing waited before, or which was held back: it is lifted to the others."""
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
        """Whether these tenants, of which something waits, may be served."""
        self._waiting[[*tenants]] = may

    def left(self, tenant: int) -> None:
        """Nothing of a tenant waits any more."""
        self._waiting[tenant] = False
        if self.several:
            self._left = self.of(tenant), self.place(tenant)

    def sent(self, tenant: int, prompt_tokens: int) -> None:
        """A tenant has sent a prompt of so many tokens."""
        if self.several:
            self._longest[tenant] = max(prompt_tokens, self._longest[tenant])

    def charge_prompt(self, tenant: int, tokens: int) -> None:
        """So many tokens of a tenant's prompt are being computed, for the first time."""
        if self.several:
            self._counters[tenant] += INPUT_COST * tokens / self.weights[tenant]

    def charge_output(self, tenant: int, tokens: int) -> None:
        """So many tokens of a tenant's output are being computed."""
        if self.several:
            self._counters[tenant] += OUTPUT_COST * tokens / self.weights[tenant]
            self.outputs[tenant] += tokens

    def charge_outputs(self, tenants: NDArray[np.int32]) -> None:
        """One token of output for each of these, [n]: a tenant as often as it decodes."""
        counts = np.bincount(tenants, minlength=len(self._counters))
        self._counters += OUTPUT_COST * counts / self.weights
        self.outputs += counts
