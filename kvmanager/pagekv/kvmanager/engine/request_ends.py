"""The end of a request: its blocks are free at once, its tenant's account is updated, observers are told."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from pagekv.common.errors import InvalidRequest, SequenceFailed, Unavailable
from pagekv.common.logs import Log
from pagekv.kvmanager.engine.capacity import longest_sequence, total_tokens
from pagekv.kvmanager.engine.features import check_supported
from pagekv.kvmanager.engine.observer import Observers, RequestEnd
from pagekv.kvmanager.engine.outputs import deliver_abort
from pagekv.kvmanager.engine.state import EngineState
from pagekv.kvmanager.engine.tenant_books import TenantBooks
from pagekv.kvmanager.engine.views import EngineInfo
from pagekv.kvmanager.scheduling.sequence import LiveRequest

log = Log(__name__)


class RequestEnds:
    """Every request passes through `remove_if_finished`:

        FINISHED  every sequence ended, or the reader found a stop string
        ABORTED   the reader has gone (at its deadline gRPC ends its call), or Abort was called: `abort`; the grace
                  time is over, and the reader gets an error, because the next manager can resume the request: `end`
        FAILED    another executor cannot continue it: `fail_misfits`; the executor gave it up: `give_up`; its step
                  failed too often: `fail`

    Used by the engine loop alone.
    """

    def __init__(
        self, state: EngineState, tenants: TenantBooks, observers: Observers, wake: Callable[[], None]
    ) -> None:
        """`wake` wakes the loop, because there may be room for other requests now."""
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

    def fail_misfits(self, model: EngineInfo, max_running: int) -> None:
        """Fails requests that the executor being attached, which serves `model`, cannot continue exactly."""
        old = self._state.model or model
        identity = attrgetter("model_fingerprint", "vocab_size", "eos_token_ids")
        same = identity(old) == identity(model)
        if old != model:
            log.warning("the executor changed", same_model=same, blocks=model.num_device_blocks, model=model.model_id)
        for request in self._state.live.all():
            width = request.command.sampling.beam_width
            fits = total_tokens(request.command) <= longest_sequence(model, width)
            if not (same and fits and width <= max_running):
                what = "another model, a smaller pool, or room for fewer sequences"
                self.fail(request, Unavailable(f"the executor restarted with {what}"))
                continue
            try:
                check_supported(request.command.sampling, model)
            except InvalidRequest as error:
                self.fail(request, error)

    def give_up(self, request: LiveRequest, reason: str) -> None:
        """Fails a request that the executor cannot continue; `reason` is the executor's."""
        self._state.totals.failed_requests_total += 1
        error = SequenceFailed(f"request {request.command.request_id!r} could not be computed: {reason}")
        log.error("the executor gave up a request", reason=error)
        self.fail(request, error)

    def end(self, request: LiveRequest, end: RequestEnd) -> None:
        """Ends what still runs of a request, without telling its reader."""
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
