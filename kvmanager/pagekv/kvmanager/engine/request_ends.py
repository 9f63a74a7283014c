"""The end of a request, whichever way: its blocks are free at once, its tenant's book is closed, observers hear of
it.
"""

from __future__ import annotations

from collections.abc import Callable

from pagekv.kvmanager.engine.observer import Observers, RequestEnd
from pagekv.kvmanager.engine.outputs import deliver_abort
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.tenant_books import TenantBooks
from pagekv.kvmanager.scheduling.sequence import LiveRequest


class RequestEnds:
    """Every request passes through `remove_if_finished`:

        FINISHED  every sequence ended, or the reader found a stop string
        ABORTED   the reader has gone or Abort: `abort`; the end of the grace time, for the reader an error, since the
                  next manager can go on: `end`
        FAILED    another executor cannot continue it, the executor gave it up, or its step failed too often: `fail`

    Used by the engine loop alone.
    """

    def __init__(
        self, state: EngineState, tenants: TenantBooks, observers: Observers, wake: Callable[[], None]
    ) -> None:
        """`wake` lets the loop see what there is room for now."""
        self._state, self._tenants, self._observers, self._wake = state, tenants, observers, wake

    def abort(self, request: LiveRequest) -> None:
        """Ends a request that nobody wants any more; its streams get finish ABORT."""
        self._state.totals.aborted_requests_total += 1
        deliver_abort(request)
        self.end(request, RequestEnd.ABORTED)

    def fail(self, request: LiveRequest, error: Exception) -> None:
        """Ends a request that cannot go on; its reader gets the error."""
        self.end(request, RequestEnd.FAILED)
        request.stream.fail(error)

    def end(self, request: LiveRequest, end: RequestEnd) -> None:
        """Ends what still runs of a request, and tells its reader nothing."""
        for sequence in request.sequences:
            self._state.serving().finish(sequence)
        self.remove_if_finished(request, end)
        self._wake()

    def remove_if_finished(self, request: LiveRequest, end: RequestEnd) -> None:
        """Forgets a request whose last sequence has ended."""
        if self._state.live.remove_if_finished(request):
            self._tenants.end(request)
            self._observers.ended(request, end)
            self._state.serving().remove(request)
