"""Results of steps, and ends, as a reader of the stream gets them."""

from __future__ import annotations

import asyncio

from support.engine.engine_harness import command

from pagekv.kvmanager.engine.outputs import deliver, deliver_abort
from pagekv.kvmanager.request.command import FinishReason, GenerateCommand, SamplingParams
from pagekv.kvmanager.request.logprobs import TokenLogprobs
from pagekv.kvmanager.request.stream import RequestStream, SequenceDelta
from pagekv.kvmanager.scheduling.beam_search import BeamSearch
from pagekv.kvmanager.scheduling.sequence import LiveRequest, SeqStatus, live_request
from pagekv.kvmanager.scheduling.step_plan import Committed, Ending, StepResult


def make(n: int) -> LiveRequest:
    return live_request(command("r", [1, 2], n=n), RequestStream("r", n), 0, b"root", 0)


def taken(request: LiveRequest) -> list[SequenceDelta]:
    return asyncio.run(request.stream.take())


def test_tokens_logprobs_and_ends_of_a_step_reach_the_stream() -> None:
    request = make(2)
    first, second = request.sequences
    logprobs = {7: TokenLogprobs(20, -0.5)}
    committed = Committed([first, second], [3, 7], [10, 20], {0: Ending(FinishReason.STOP, 10)}, [])
    assert deliver(committed, StepResult(1, [3, 7], [10, 20], logprobs, 2, 0, 0)) == [first]
    ended, going = taken(request)
    assert (ended.token_ids, ended.finish, ended.stop_token_id) == ([10], FinishReason.STOP, 10)
    assert (going.token_ids, going.finish, list(going.logprobs)) == ([20], None, [logprobs[7]])


def searching(sampling: SamplingParams) -> tuple[LiveRequest, BeamSearch]:
    request = live_request(GenerateCommand("r", [1, 2], sampling, n=2), RequestStream("r", 2), 0, b"root", 0)
    request.search = BeamSearch(sampling, 2)
    return request, request.search


def test_the_results_of_a_search_say_which_token_ended_them() -> None:
    request, search = searching(SamplingParams(max_tokens=2, beam_width=2, stop_token_ids=(9,)))
    search.advance([[(9, -0.1), (4, -1.0), (5, -2.0)]])
    search.advance([[(6, -0.5), (7, -3.0), (8, -3.0)]] * 2)
    assert deliver(Committed([], [], [], {}, [request]), StepResult(1, [], [], {}, 2, 0, 0)) == [request.sequences[0]]
    assert [(delta.token_ids, delta.finish, delta.stop_token_id) for delta in taken(request)] == [
        ([9], FinishReason.STOP, 9),
        ([4, 6], FinishReason.LENGTH, None),
    ]


def test_an_abort_ends_the_outputs_that_have_not_ended() -> None:
    request = make(3)
    request.sequences[1].state = SeqStatus.FINISHED
    deliver_abort(request)
    assert [(delta.index, delta.finish) for delta in taken(request)] == [
        (0, FinishReason.ABORT),
        (2, FinishReason.ABORT),
    ]


def test_an_abort_ends_as_many_outputs_as_a_search_would_have_had() -> None:
    request, _ = searching(SamplingParams(beam_width=3))
    assert len(request.sequences) == 1
    deliver_abort(request)
    assert [(delta.index, delta.finish) for delta in taken(request)] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]
