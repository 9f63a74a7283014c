"""Callbacks of a scheduler, by which its decisions can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping

from pagekv.kvmanager.errors import InvariantError
from pagekv.kvmanager.kvcache.block_pool import BlockPool
from pagekv.kvmanager.kvcache.host_pool import HostPool
from pagekv.kvmanager.scheduling.fairness.step_bound import StepBound
from pagekv.kvmanager.scheduling.fairness.tenant_caps import Cap
from pagekv.kvmanager.scheduling.limits import SchedulerLimits
from pagekv.kvmanager.scheduling.sequence import LiveRequest, Seq
from pagekv.kvmanager.scheduling.step_plan import StepPlan, StepResult


class SchedulerListener:
    """Does nothing; listeners override the methods they need. Methods whose names end in "ing" are called before the
    scheduler decides anything, the others afterwards.

    Arguments are live objects: a listener must copy what it needs before it returns.
    """

    def epoch_began(
        self, pool: BlockPool, host: HostPool, limits: SchedulerLimits, eos_token_ids: tuple[int, ...]
    ) -> None:
        """The scheduler has new, empty pools."""

    def adding(self, request: LiveRequest) -> None:
        """`Scheduler.add` was called."""

    def tenants_set(self, weights: Mapping[int, float], floors: Mapping[int, int], caps: Mapping[int, Cap]) -> None:
        """`Scheduler.set_tenants` was called; its settings hold for later epochs, too."""

    def bound_set(self, bound: StepBound) -> None:
        """`Scheduler.set_bound` was called with another bound, which holds for later epochs, too."""

    def scheduled(self, plan: StepPlan | None) -> None:
        """`Scheduler.schedule` was called and returns `plan`; None also if it raises, which `failed` reports next."""

    def committing(self, plan: StepPlan, result: StepResult) -> None:
        """`Scheduler.commit` was called."""

    def finishing(self, sequence: Seq) -> None:
        """`Scheduler.finish` was called."""

    def preempting_all(self) -> None:
        """`Scheduler.preempt_all` was called."""

    def clearing_cache(self) -> None:
        """`Scheduler.clear_prefix_cache` was called."""

    def failed(self, error: InvariantError) -> None:
        """The latest `schedule` or `commit` raised this."""
