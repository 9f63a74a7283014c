"""Jobs that wait for a worker process or for threads: their number and their bytes, by tenant, with bounds."""

from __future__ import annotations

from pagekv.common.errors import Overloaded
from pagekv.kvmanager.request.tenant_counts import TenantCounts

RETRY_DELAY_S = 1.0


class WaitingJobs:
    """The jobs that wait or run, with bounds on their number and on the bytes of their bodies.

    If a bound is reached, a tenant with less than an equal share of it still gets in, because other tenants have filled
    it. Nothing is kept about tenants without jobs.
    """

    def __init__(self, kind: str, max_jobs: int, max_bytes: int) -> None:
        """`kind`: who does the jobs, named in refusals."""
        self._kind = kind
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        # By tenant; "" on a manager without identities.
        self._jobs: TenantCounts[str] = TenantCounts()
        self._bytes: TenantCounts[str] = TenantCounts()

    def enter(self, tenant: str, num_bytes: int) -> None:
        """Counts a new job with a body of `num_bytes`. Raises Overloaded, without numbers of other tenants."""
        jobs, own_jobs, most = self._jobs.total, self._jobs[tenant], self._max_jobs
        if jobs >= most and not (tenant and own_jobs < max(1, self._share(tenant, most))):
            what = f"{own_jobs} texts of your tenant" if tenant else f"{jobs} texts"
            raise Overloaded(
                f"{what} wait to be read by the {self._kind}; the limit for all is {most}", RETRY_DELAY_S, most
            )
        held, own_held, most = self._bytes.total, self._bytes[tenant], self._max_bytes
        if held + num_bytes > most and not (tenant and own_held + num_bytes <= self._share(tenant, most)):
            what = f"{own_held} bytes of your tenant" if tenant else f"{held} bytes"
            what += (
                f" wait to be read by the {self._kind}; with the {num_bytes} of this text the limit for all is {most}"
            )
            raise Overloaded(what, RETRY_DELAY_S, most)
        self._jobs.add(tenant, 1)
        self._bytes.add(tenant, num_bytes)

    def leave(self, tenant: str, num_bytes: int) -> None:
        """Ends the counting of a job that is done, or that nobody waits for any more."""
        self._jobs.add(tenant, -1)
        self._bytes.add(tenant, -num_bytes)

    def _share(self, tenant: str, most: int) -> int:
        return most // self._jobs.num_tenants(tenant)
