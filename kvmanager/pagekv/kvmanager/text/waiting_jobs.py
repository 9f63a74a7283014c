"""Jobs on their way through a worker process: how many there are, how much they hold, and whose they are."""

from __future__ import annotations

from collections import Counter

from pagekv.common.errors import Overloaded

RETRY_DELAY_S = 1.0


class WaitingJobs:
    """The jobs that wait and the one that is done, with bounds on their number and on the bytes of their bodies.

    A tenant that has less than an equal share of a bound gets in although the bound is reached, for others have filled
    it. Nothing is kept of tenants that have no job.
    """

    def __init__(self, kind: str, max_jobs: int, max_bytes: int) -> None:
        """`kind` of the process, for the words of refusals."""
        self._kind = kind
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        # By tenant, "" where nobody is asked for an identity.
        self._jobs: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def enter(self, tenant: str, num_bytes: int) -> None:
        """Takes in a job with a body of so many bytes. Raises Overloaded, which tells a tenant of its own alone."""
        jobs, own_jobs, most = self._jobs.total(), self._jobs[tenant], self._max_jobs
        if jobs >= most and not (tenant and own_jobs < max(1, self._share(tenant, most))):
            what = f"{own_jobs} texts of your tenant" if tenant else f"{jobs} texts"
            raise Overloaded(f"{what} wait to be read by the {self._kind}, at most {most} of all", RETRY_DELAY_S, most)
        held, own_held, most = self._bytes.total(), self._bytes[tenant], self._max_bytes
        if held + num_bytes > most and not (tenant and own_held + num_bytes <= self._share(tenant, most)):
            what = f"{own_held} bytes of your tenant" if tenant else f"{held} bytes"
            what += f" wait to be read by the {self._kind}, with the {num_bytes} of this text at most {most} of all"
            raise Overloaded(what, RETRY_DELAY_S, most)
        self._jobs[tenant] += 1
        self._bytes[tenant] += num_bytes

    def leave(self, tenant: str, num_bytes: int) -> None:
        """A job that was taken in is done, or nobody waits for it any more."""
        self._jobs[tenant] -= 1
        self._bytes[tenant] -= num_bytes
        if not self._jobs[tenant]:
            del self._jobs[tenant], self._bytes[tenant]

    def _share(self, tenant: str, most: int) -> int:
        return most // len(self._jobs.keys() | {tenant})
