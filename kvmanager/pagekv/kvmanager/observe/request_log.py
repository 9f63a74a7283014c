"""Lines of the log about each request, for `--log-level debug`, with the request's id, its tenant and counts, but
without text and tokens.
"""

from __future__ import annotations

from pagekv.common.logs import Log
from pagekv.kvmanager.engine.observer import Observer, RequestEnd
from pagekv.kvmanager.scheduling.sequence import LiveRequest
from pagekv.kvmanager.scheduling.step_plan import StepPlan

log = Log(__name__)


class RequestLog(Observer):
    """A line when a request is queued, when one of its sequences is given to the executor, at first or again after a
    preemption or a lost executor, and when the request has ended. The times are those of the lines.
    """

    def submitted(self, request: LiveRequest) -> None:
        command = request.command
        log.debug(
            "request queued",
            request=command.request_id,
            tenant=command.tenant.name,
            prompt_tokens=len(command.prompt_ids),
            sequences=len(request.sequences),
        )

    def planned(self, plan: StepPlan) -> None:
        for new in plan.new:
            sequence = new.sequence
            log.debug(
                "sequence computed from here",
                request=sequence.request.command.request_id,
                sequence=sequence.index,
                known_tokens=len(new.token_ids),
                computed_tokens=new.computed_tokens,
                preemptions=sequence.preemptions,
            )

    def ended(self, request: LiveRequest, end: RequestEnd) -> None:
        log.debug(
            "request ended",
            request=request.command.request_id,
            how=end.value,
            output_tokens=sum(sequence.num_output for sequence in request.sequences),
            # A beam search may have no live beam left.
            preemptions=max((sequence.preemptions for sequence in request.sequences), default=0),
        )
