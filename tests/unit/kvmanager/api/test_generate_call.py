"""Generate through the service: deltas that the engine pushes, and messages that the client gets."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import grpc
import pytest
from support.engine.inference_harness import ABORT, LENGTH, STOP, TOKENIZER, Harness, bytes_of, request, run, tokens_of
from support.event_loop import counted_turns, run_by, until

from pagekv.kvmanager.api import generate_call
from pagekv.kvmanager.api.output_processor import OutputProcessor, TextDelta
from pagekv.kvmanager.request.command import FinishReason
from pagekv.kvmanager.request.logprobs import LOGPROBS_AT_ONCE, TokenLogprobs
from pagekv.kvmanager.request.stream import SequenceDelta
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2


@run_by(run)
async def test_a_stream_of_chunks_and_its_end(h: Harness) -> None:
    call = await h.start(request())
    smile = bytes_of("😀")
    first, second = tokens_of(" beginning ") + smile[:1], smile[1:]
    h.engine.push("r", *first)
    chunk = (await call.read()).chunk
    assert (list(chunk.token_ids), chunk.text, chunk.index) == (first, " beginning ", 0)
    assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens) == (2, len(first), 1)
    h.engine.push("r", *second)
    chunk = (await call.read()).chunk
    assert (list(chunk.token_ids), chunk.text) == (second, "😀")
    assert chunk.completion_tokens == len(first) + 3
    h.engine.push("r", 50, finish=FinishReason.LENGTH)
    last = await call.read()
    assert last.request_id == "r"
    assert list(last.chunk.token_ids) == [50]
    complete = (await call.read()).complete
    assert complete.finish_reason == LENGTH
    assert list(complete.token_ids) == [*first, *second, 50]
    assert complete.text == " beginning 😀" + TOKENIZER.decode([50])
    assert (complete.prompt_tokens, complete.completion_tokens) == (2, len(first) + 4)
    assert (complete.cached_tokens, complete.preemptions) == (1, 2)
    assert complete.WhichOneof("matched_stop") is None
    assert await call.rest() == []
    assert await call.code() is grpc.StatusCode.OK
    assert h.engine.aborted == []
    assert list(h.engine.commands[0].prompt_ids) == tokens_of("In the")


@run_by(run)
async def test_a_tenant_is_not_told_how_often_others_made_it_wait(
    h: Harness, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_call, "sees_all", lambda: False)
    call = await h.start(request(only_complete=True))
    h.engine.push("r", 50, finish=FinishReason.LENGTH)
    assert (await call.read()).complete.preemptions == 0


@run_by(run)
async def test_a_reader_that_leaves_late_does_not_end_a_request_of_the_same_id(h: Harness) -> None:
    """The id is free once its request has ended, however much its reader has not taken yet."""
    late = await h.start(request())
    first = h.engine.live.pop("r")
    again = await h.start(request())
    late.cancel()
    await until(lambda: h.engine.left == [first])
    h.engine.push("r", 50, finish=FinishReason.LENGTH)
    assert list((await again.read()).chunk.token_ids) == [50]
    assert h.engine.aborted == []


@run_by(run)
async def test_a_slow_reader_gets_its_tokens_in_one_chunk(h: Harness) -> None:
    call = await h.start(request())
    for _ in range(20):
        h.engine.push("r", 50)
    h.engine.push("r", 51, finish=FinishReason.LENGTH)
    chunks = await call.rest()
    assert len(chunks) == 2
    assert list(chunks[0].chunk.token_ids) == [50] * 20 + [51]


@pytest.mark.parametrize("only_complete", [False, True])
@run_by(run)
async def test_the_event_loop_turns_while_text_is_made_of_what_a_slow_reader_left(
    h: Harness, *, only_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40,000 tokens with 16 stop strings would take a third of a second, in which no step is planned."""
    seen, take = list[tuple[int, int]](), OutputProcessor.take
    call = await h.start(request(params={"stop": ["never"]}, only_complete=only_complete))
    async with counted_turns() as turns:

        def noting(self: OutputProcessor, delta: SequenceDelta) -> TextDelta:
            seen.append((len(delta.token_ids), turns()))
            return take(self, delta)

        monkeypatch.setattr(OutputProcessor, "take", noting)
        h.engine.push("r", *[50] * 1000, finish=FinishReason.LENGTH)
        messages = await call.rest()
    assert [tokens for tokens, _ in seen] == [256, 256, 256, 232]
    assert all(later > earlier for (_, earlier), (_, later) in pairwise(seen))
    assert [len(message.chunk.token_ids) for message in messages[:-1]] == (
        [] if only_complete else [256, 256, 256, 232]
    )
    assert list(messages[-1].complete.token_ids) == [50] * 1000
    assert messages[-1].complete.finish_reason == LENGTH


@pytest.mark.parametrize("only_complete", [False, True])
@run_by(run)
async def test_the_event_loop_turns_while_many_log_probabilities_are_written(
    h: Harness, *, only_complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message has the log-probabilities of all tokens: of 4,000 tokens with 20 each a tenth of a second."""
    seen, made = list[int](), generate_call._position_logprobs
    call = await h.start(request(params={"logprobs": 1}, only_complete=only_complete))
    async with counted_turns() as turns:

        def noting(logprobs: TokenLogprobs) -> types_pb2.PositionLogprobs:
            seen.append(turns())
            return made(logprobs)

        monkeypatch.setattr(generate_call, "_position_logprobs", noting)
        logprobs = [TokenLogprobs(50, -0.5, ((50, -0.5),))] * 1000
        h.engine.live["r"].push(SequenceDelta(0, [50] * 1000, logprobs, finish=FinishReason.LENGTH))
        *chunks, last = await call.rest()
    assert len(last.complete.logprobs) == 1000
    assert sum(len(message.chunk.logprobs) for message in chunks) == (0 if only_complete else 1000)
    assert max(Counter(seen).values()) == LOGPROBS_AT_ONCE


@run_by(run)
async def test_a_stop_string_in_what_a_slow_reader_left_ends_the_sequence_there(h: Harness) -> None:
    call = await h.start(request(params={"stop": ["🙂"]}))
    tokens = [50] * 300 + bytes_of("🙂") + [50] * 300
    h.engine.push("r", *tokens, finish=FinishReason.LENGTH)
    *chunks, last = await call.rest()
    assert [token for message in chunks for token in message.chunk.token_ids] == tokens[:304]
    assert (last.complete.finish_reason, last.complete.stop_string) == (STOP, "🙂")
    assert len(last.complete.token_ids) == 304


@run_by(run)
async def test_n_sequences_are_independent_and_all_are_completed(h: Harness) -> None:
    call = await h.start(request(params={"n": 3, "stop": ["c"]}))
    for index, text in enumerate("abc"):
        h.engine.push("r", *tokens_of(text), index=index)
    messages = [await call.read() for _ in range(4)]
    assert [(m.chunk.index, m.chunk.text) for m in messages[:3]] == [(0, "a"), (1, "b"), (2, "")]
    assert (messages[3].complete.index, messages[3].complete.stop_string) == (2, "c")
    h.engine.push("r", *tokens_of("late"), index=2)
    h.engine.push("r", *tokens_of("a"), index=1, finish=FinishReason.STOP)
    h.engine.push("r", *tokens_of("e"), index=0, finish=FinishReason.LENGTH)
    rest = await call.rest()
    assert sorted(m.complete.text for m in rest if m.WhichOneof("event") == "complete") == ["ae", "b"]
    assert all(m.chunk.index != 2 for m in rest if m.WhichOneof("event") == "chunk")
    assert h.engine.stopped == [("r", 2)]


@run_by(run)
async def test_only_complete_sends_nothing_else(h: Harness) -> None:
    call = await h.start(request(only_complete=True))
    h.engine.push("r", *tokens_of("a"))
    await asyncio.sleep(0.01)
    h.engine.push("r", *tokens_of("b"), finish=FinishReason.LENGTH)
    messages = await call.rest()
    assert [m.WhichOneof("event") for m in messages] == ["complete"]
    assert messages[0].complete.text == "ab"


@run_by(run)
async def test_beam_search_sends_its_results_best_first_and_no_chunks(h: Harness) -> None:
    """The engine pushes every result whole; a stop token is reported without text, as ever."""
    params = {"n": 2, "beam_width": 3, "max_tokens": 4, "stop_token_ids": tokens_of("d")}
    call = await h.start(request(params=params))
    assert h.engine.commands[0].sampling.beam_width == 3
    best, second = tokens_of("a") + tokens_of("d"), tokens_of("b") + tokens_of("c")
    stream = h.engine.live["r"]
    stream.push(SequenceDelta(0, best, finish=FinishReason.STOP, stop_token_id=best[-1], cumulative_logprob=-1.25))
    stream.push(SequenceDelta(1, second, finish=FinishReason.LENGTH, cumulative_logprob=-2.5))
    messages = await call.rest()
    assert [m.WhichOneof("event") for m in messages] == ["complete", "complete"]
    first, last = (m.complete for m in messages)
    assert (first.index, list(first.token_ids), first.text, first.finish_reason) == (0, best, "a", STOP)
    assert (first.cumulative_logprob, first.stop_token_id, first.completion_tokens) == (-1.25, best[-1], 2)
    assert (last.index, list(last.token_ids), last.text, last.finish_reason) == (1, second, "bc", LENGTH)
    assert last.cumulative_logprob == -2.5


@run_by(run)
async def test_sampling_has_no_cumulative_logprob(h: Harness) -> None:
    call = await h.start(request())
    h.engine.push("r", 50, finish=FinishReason.LENGTH)
    assert not (await call.rest())[-1].complete.HasField("cumulative_logprob")


@run_by(run)
async def test_logprobs_arrive_with_their_tokens(h: Harness) -> None:
    call = await h.start(request(params={"logprobs": 2}))
    logprobs = [TokenLogprobs(50, -1.5, ((51, -0.25), (50, -1.5)))]
    h.engine.live["r"].push(SequenceDelta(0, [50], logprobs, finish=FinishReason.LENGTH))
    chunk = (await call.read()).chunk
    assert (chunk.logprobs[0].chosen.token_id, chunk.logprobs[0].chosen.logprob) == (50, -1.5)
    assert [(top.token_id, top.logprob) for top in chunk.logprobs[0].top] == [(51, -0.25), (50, -1.5)]
    assert (await call.read()).complete.logprobs == chunk.logprobs


@pytest.mark.parametrize("read_first", [True, False])
@run_by(run)
async def test_cancelling_aborts(h: Harness, *, read_first: bool) -> None:
    call = await h.start(request())
    if read_first:
        h.engine.push("r", 50)
        await call.read()
    call.cancel()
    await until(lambda: h.engine.aborted == ["r"])


@run_by(run, tokenizer=None)
async def test_cancelling_while_the_server_is_writing_aborts(h: Harness) -> None:
    """A reader that never reads fills the flow-control window, so the handler is stuck in a write."""
    call = await h.start(request())
    stream = h.engine.live["r"]
    for _ in range(400):  # gRPC itself takes a few megabytes
        h.engine.push("r", *[399] * 50_000)
        await asyncio.sleep(0.005)
        if sum(len(delta.token_ids) for delta in stream._pending.values()) > 200_000:
            break
    else:
        raise AssertionError("the server goes on taking tokens although nobody reads them")
    call.cancel()
    await until(lambda: h.engine.aborted == ["r"])


@run_by(run)
async def test_a_deadline_aborts(h: Harness) -> None:
    seconds = 0.2
    while not h.engine.commands:
        # A busy machine may need longer to begin it.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in h.stub.Generate(request(), timeout=seconds):
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        seconds *= 4
    await until(lambda: len(h.engine.aborted) == len(h.engine.commands))


@run_by(run)
async def test_the_end_of_a_call_never_aborts_its_successor(h: Harness) -> None:
    for _ in range(20):
        call = await h.start(request())
        h.engine.push("r", 50, finish=FinishReason.LENGTH)
        assert len(await call.rest()) == 2
        del h.engine.live["r"]
    assert h.engine.aborted == []


@run_by(run)
async def test_abort_ends_the_stream_with_what_there_was(h: Harness) -> None:
    call = await h.start(request())
    h.engine.push("r", *tokens_of("a"))
    await call.read()
    answer = await h.stub.Abort(pb.AbortRequest(request_ids=["r", "unknown", "r"]))
    assert list(answer.aborted_request_ids) == ["r"]
    complete = (await call.read()).complete
    assert (complete.finish_reason, complete.text) == (ABORT, "a")
    assert await call.rest() == []
    assert h.engine.aborted == ["r"]
