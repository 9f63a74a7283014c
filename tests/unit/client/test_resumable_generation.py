"""A generation whose connection breaks goes on with the tokens that would have followed: none lost, none repeated."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import grpc
import pytest
from support.clients.scripted_server import LOST, MODEL, Fails, Hangs, ScriptedServer, answer, chunk, complete

from pagekv.client import (
    ChatMessage,
    ConnectionLost,
    FailedPrecondition,
    PageKVClient,
    ServerError,
    wire,
)
from pagekv.client.generation_types import GenerateOptions, PositionLogprobs, TokenLogprob
from pagekv.client.resumable_generation import ResumableGeneration
from pagekv.client.settings import CallSettings
from pagekv.common import errors
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import types_pb2

LOST_ERROR = ConnectionLost("gone")


def resumed_with(*received: int) -> Any:
    """A check that the request resumes a stream of which `received` arrived."""

    def check(request: pb.GenerateRequest) -> None:
        assert tuple(request.resumed_token_ids) == received
        assert request.model_fingerprint == MODEL

    return check


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3], [ChatMessage("user", "hi")]], ids=["text", "ids", "chat"])
def test_a_prompt_of_any_kind_is_resumed_without_a_token_lost_or_repeated(
    server: ScriptedServer, client: PageKVClient, prompt: Any
) -> None:
    first: list[pb.GenerateRequest] = []
    server.expect(
        "Generate", chunk(4, 5, cached=2), chunk(6, text="", done=2, cached=2), Fails(LOST), check=first.append
    )

    def check(request: pb.GenerateRequest) -> None:
        resumed_with(4, 5, 6)(request)
        # All else stays: prompt, seed, sampling, request id, cache controls.
        del request.resumed_token_ids[:]
        request.model_fingerprint = ""
        assert request == first[0]

    # The text of token 6 comes with the first new tokens.
    server.expect(
        "Generate",
        chunk(7, text="t6 t7 ", done=3, cached=6),
        complete(7, text="t6 t7 ", cached=6, resumed=3),
        check=check,
    )
    stream = client.stream(prompt, temperature=0.5, priority=2)
    chunks = list(stream)
    assert [token for c in chunks for token in c.token_ids] == [4, 5, 6, 7]
    assert "".join(c.text for c in chunks) == "t4 t5 t6 t7 "
    assert [c.completion_tokens for c in chunks] == [2, 3, 4, 4]
    assert {c.cached_tokens for c in chunks} == {2}
    end = stream.completion
    assert (end.text, end.token_ids) == ("t4 t5 t6 t7 ", (4, 5, 6, 7))
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens, end.resumes) == (3, 4, 2, 1)


@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_second_break_goes_on_behind_both_parts(server: ScriptedServer, client: PageKVClient, call: str) -> None:
    server.expect("Generate", chunk(4), Fails(LOST))
    server.expect("Generate", chunk(5, done=1), Fails(LOST), check=resumed_with(4))
    server.expect("Generate", chunk(6, done=2), complete(6, resumed=2), check=resumed_with(4, 5))
    if call == "generate":
        end = client.generate("hello", max_tokens=9)
    else:
        stream = client.stream("hello", max_tokens=9)
        assert [c.token_ids for c in stream] == [(4,), (5,), (6,), ()]
        end = stream.completion
    assert (end.token_ids, end.text, end.resumes) == ((4, 5, 6), "t4 t5 t6 ", 2)


def _equal(a: object, b: object) -> None:
    assert a == b


def test_a_break_between_the_last_token_and_the_end(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4, 5), Fails(LOST))
    server.expect("Generate", complete(text="", resumed=2), check=resumed_with(4, 5))
    end = client.generate([1, 2, 3])
    assert (end.token_ids, end.text, end.completion_tokens) == ((4, 5), "t4 t5 ", 2)


def test_a_break_after_the_end_is_no_matter(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4), complete(4), Fails(LOST))
    assert client.generate("x").token_ids == (4,)


def test_nothing_received_is_asked_for_again_as_it_was(server: ScriptedServer, client: PageKVClient) -> None:
    sent: list[pb.GenerateRequest] = []
    server.expect("Generate", Fails(LOST), check=sent.append)
    server.expect("Generate", *answer(4, cached=2), check=sent.append)
    end = client.generate("x")
    assert sent[0] == sent[1]
    assert (end.token_ids, end.cached_tokens, end.resumes) == ((4,), 2, 1)


def test_several_sequences_are_asked_for_again_whole_and_nothing_comes_twice(
    server: ScriptedServer, client: PageKVClient
) -> None:
    first: list[pb.GenerateRequest] = []
    server.expect(
        "Generate",
        chunk(4, 5, index=1, cached=2),
        chunk(8, index=0, cached=2),
        complete(8, index=0, cached=2),
        Fails(LOST),
        check=first.append,
    )

    def check(request: pb.GenerateRequest) -> None:
        assert request.model_fingerprint == MODEL
        request.model_fingerprint = ""
        assert request == first[0]

    # Cut elsewhere, in another order, and with the text of token 5 a token later. The second break is in the middle of
    # what the caller has already.
    server.expect("Generate", chunk(8, index=0), chunk(4, index=1), Fails(LOST), check=check)
    server.expect(
        "Generate",
        chunk(4, index=1),
        chunk(5, 6, index=1, done=1),
        complete(4, 5, 6, index=1),
        chunk(8, index=0),
        complete(8, index=0),
        check=check,
    )
    stream = client.stream("x", n=2)
    chunks = [(c.index, c.token_ids, c.text, c.cached_tokens, c.finish_reason) for c in stream]
    assert chunks == [
        (1, (4, 5), "t4 t5 ", 2, None),
        (0, (8,), "t8 ", 2, None),
        (0, (), "", 2, "length"),
        (1, (6,), "t6 ", 2, None),
        (1, (), "", 2, "length"),
    ]
    ends = stream.completions
    assert [(ends[i].token_ids, ends[i].text, ends[i].cached_tokens) for i in range(2)] == [
        ((8,), "t8 ", 2),
        ((4, 5, 6), "t4 t5 t6 ", 2),
    ]
    assert [ends[i].resumes for i in range(2)] == [0, 2]


def test_several_whole_answers_are_asked_for_until_each_has_come(server: ScriptedServer, client: PageKVClient) -> None:
    searches: list[GenerateOptions] = [{}, {"beam_width": 2}]
    for beams in searches:
        server.expect("Generate", complete(5, index=0), Fails(LOST))
        server.expect("Generate", complete(5, index=0), complete(6, index=1))
        assert [c.token_ids for c in client.generate_n("x", 2, **beams)] == [(5,), (6,)]


@pytest.mark.parametrize(
    "again", [[chunk(9, index=1)], answer(9, 5, index=1), answer(8, index=0), answer(7, 8, index=0)]
)
def test_other_tokens_for_those_received_are_an_error(server: ScriptedServer, client: PageKVClient, again: Any) -> None:
    """Rather than a stream with a beginning of one and an end of another."""
    server.expect("Generate", chunk(4, index=1), *answer(7, index=0), Fails(LOST))
    server.expect("Generate", *again)
    with pytest.raises(ServerError, match="other tokens than those received"):
        list(client.stream("x", n=2))


@pytest.mark.parametrize(
    "refusal",
    [
        errors.Unavailable("no executor is attached yet", 0.01),
        errors.Overloaded("queue full", 0.01),
        # The server has not noticed yet that the first connection is gone.
        errors.AlreadyExists("request_id", "is running"),
    ],
)
def test_a_server_that_is_not_ready_yet_is_asked_again(
    server: ScriptedServer, client: PageKVClient, refusal: errors.PageKVError
) -> None:
    server.expect("Generate", chunk(4), Fails(LOST))
    server.expect("Generate", Fails(refusal), check=resumed_with(4))
    server.expect("Generate", chunk(5, done=1), complete(5, resumed=1), check=resumed_with(4))
    assert client.generate([1, 2, 3]).token_ids == (4, 5)


@pytest.mark.parametrize("status", [grpc.StatusCode.INTERNAL, errors.InvalidRequest("resumed_token_ids", "no")])
def test_other_errors_end_it(server: ScriptedServer, client: PageKVClient, status: Any) -> None:
    server.expect("Generate", chunk(4), Fails(LOST))
    server.expect("Generate", Fails(status))
    with pytest.raises((ServerError, errors.InvalidRequest)):
        client.generate([1, 2, 3])


def test_a_server_that_shuts_down_before_it_takes_the_call_is_asked_again(
    server: ScriptedServer, client: PageKVClient
) -> None:
    """gRPC cancels such calls by itself, with the status of a caller that changed its mind."""
    server.expect("Generate", Fails(grpc.StatusCode.CANCELLED))
    server.expect("Generate", chunk(4), complete(4))
    assert client.generate([1, 2, 3]).token_ids == (4,)


def test_a_manager_that_shuts_down_is_followed_by_another(server: ScriptedServer, client: PageKVClient) -> None:
    """Before it took the call, before the first token, and in the middle."""
    draining = Fails(errors.Draining("the manager is shutting down", 0.01))
    server.expect("Generate", draining)
    server.expect("Generate", chunk(4), draining)
    server.expect("Generate", draining, check=resumed_with(4))
    server.expect("Generate", chunk(5, done=1), complete(5, resumed=1), check=resumed_with(4))
    end = client.generate([1, 2, 3])
    assert (end.token_ids, end.resumes) == ((4, 5), 2)
    server.expect("Generate", draining)
    with pytest.raises(errors.Draining, match="is shutting down"):
        client.with_options(max_retries=0).generate([1, 2, 3], resume_timeout=0)


def test_resuming_can_be_switched_off(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4), Fails(LOST), check=lambda r: _equal(r.only_complete, False))
    stream = client.stream("x", resume_timeout=0)
    assert next(stream).token_ids == (4,)
    with pytest.raises(ConnectionLost, match="was lost"):
        next(stream)
    # Without resuming, chunks are of no use to `generate`.
    server.expect("Generate", complete(4), check=lambda r: _equal(r.only_complete, True))
    client.generate("x", resume_timeout=0)


def test_a_broken_beam_search_is_asked_for_again(server: ScriptedServer, client: PageKVClient) -> None:
    """A beam search has sent nothing that could be resumed, and finds the same results again."""
    sent: list[pb.GenerateRequest] = []
    for reply in (Fails(LOST), complete(4, 5, cumulative_logprob=-0.5)):
        server.expect("Generate", reply, check=sent.append)
    end = client.generate("x", beam_width=3)
    assert (end.token_ids, end.cumulative_logprob, end.resumes) == ((4, 5), -0.5, 1)
    assert sent[0] == sent[1]
    assert not sent[0].sampling_params.HasField("seed")


def test_another_tokenizer_is_noticed(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4), Fails(LOST))
    server.expect("Generate", chunk(5, prompt=4, done=1), check=resumed_with(4))
    with pytest.raises(ServerError, match=r"had 3 tokens .* 4; is it another tokenizer"):
        client.generate("x")


def test_another_model_is_never_gone_on_with(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4, 5), Fails(LOST))
    refused = errors.FailedPrecondition("model_fingerprint: the model served is beef, not f00d")
    server.expect("Generate", Fails(refused), check=resumed_with(4, 5))
    stream = client.stream([1, 2, 3])
    assert next(stream).token_ids == (4, 5)
    with pytest.raises(FailedPrecondition, match="model served is beef, not f00d"):
        next(stream)


def test_a_stream_that_ends_early_without_a_status_is_an_error(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4))
    with pytest.raises(ServerError, match="ended before"):
        client.generate("x")


def test_the_server_is_killed_and_comes_back(server: ScriptedServer, make_client: Any) -> None:
    def die() -> None:
        def restart() -> None:
            server.stop()
            server.start()

        threading.Thread(target=restart).start()

    server.expect("Generate", chunk(4), chunk(5, done=1), die, Hangs())
    server.expect("Generate", chunk(6, done=2), complete(6, resumed=2), check=resumed_with(4, 5))
    stream = make_client(server.target).stream([1, 2, 3], timeout=120)
    assert [c.token_ids for c in stream] == [(4,), (5,), (6,), ()]
    assert stream.completion.resumes == 1


@pytest.mark.parametrize("seed", range(200))
def test_any_cut_gives_the_same_stream(seed: int) -> None:
    """An honest server of 12 known tokens, cut anywhere any number of times, text held back at random."""
    rng = random.Random(seed)
    tokens = list(range(100, 112))
    # Text certain after k tokens, as an incremental detokenizer with stop strings would have it: any growing prefix.
    whole = "".join(f"<{token}>" for token in tokens)
    ends = sorted(rng.randint(0, len(whole)) for _ in tokens)
    ends = [0, *ends[:-1], len(whole)]
    generation = ResumableGeneration([1, 2, 3], 1, {"logprobs": 0}, CallSettings(resume_timeout=30), clock=lambda: 0.0)
    chunks = []
    while not generation.done:
        request = generation.request()
        have = len(request.resumed_token_ids)
        assert (list(request.prompt.token_ids.ids), list(request.resumed_token_ids)) == ([1, 2, 3], tokens[:have])
        stop = rng.randint(have, len(tokens))
        at = have
        while at < stop:
            step = rng.randint(1, stop - at)
            part = tokens[at : at + step]
            response = chunk(*part, text=whole[ends[at] : ends[at + step]], done=at, cached=have)
            response.chunk.logprobs.extend(_logprobs(token) for token in part)
            (taken,) = generation.take(response)
            chunks.append(taken)
            at += step
        if stop == len(tokens) and rng.random() < 0.5:
            end = complete(*tokens[have:], text=whole[ends[have] :], resumed=have, cached=have)
            end.complete.logprobs.extend(_logprobs(token) for token in tokens[have:])
            chunks += generation.take(end)
            generation.ended()
        else:
            generation.failed(LOST_ERROR)
    end = generation.completions[0]
    assert [token for c in chunks for token in c.token_ids] == tokens == list(end.token_ids)
    assert "".join(c.text for c in chunks) == whole == end.text
    expected = tuple(PositionLogprobs(chosen=TokenLogprob(token_id=token, logprob=-1.0), top=()) for token in tokens)
    assert tuple(logprobs for c in chunks for logprobs in c.logprobs) == expected == end.logprobs
    assert chunks[-1].completion_tokens == 12
    assert [c.finish_reason for c in chunks] == [*[None] * (len(chunks) - 1), "length"]
    assert {c.cached_tokens for c in chunks} == {0}
    assert (end.cached_tokens, end.completion_tokens) == (0, 12)


@pytest.mark.parametrize("seed", range(200))
def test_any_cuts_give_the_same_streams_of_several_sequences(seed: int) -> None:
    """Three sequences that the server sends whole on every connection, cut and interleaved at random."""
    rng = random.Random(seed)
    tokens = {index: [100 * index + k for k in range(1, rng.randint(2, 8))] for index in range(3)}
    whole = {index: "".join(f"<{token}>" for token in of) for index, of in tokens.items()}
    # Text certain after k tokens.
    ends = {
        index: [0, *sorted(rng.randint(0, len(whole[index])) for _ in of[1:]), len(whole[index])]
        for index, of in tokens.items()
    }
    generation = ResumableGeneration("x", 3, {"logprobs": 0}, CallSettings(resume_timeout=30), clock=lambda: 0.0)
    got: dict[int, list[int]] = {index: [] for index in tokens}
    texts = dict.fromkeys(tokens, "")
    logprobs: list[PositionLogprobs] = []
    told: list[int] = []
    while not generation.done:
        request, at, open_ = generation.request(), dict.fromkeys(tokens, 0), [*tokens]
        assert request.prompt.text == "x"
        while open_ and rng.random() > 0.1:
            index = rng.choice(open_)
            begin, of = at[index], tokens[index]
            if begin < len(of):
                at[index] = end = rng.randint(begin + 1, len(of))
                text = whole[index][ends[index][begin] : ends[index][end]]
                response = chunk(*of[begin:end], index=index, text=text, done=begin)
                response.chunk.logprobs.extend(map(_logprobs, of[begin:end]))
            else:
                open_.remove(index)
                response = complete(*of, index=index, text=whole[index])
                response.complete.logprobs.extend(map(_logprobs, of))
            for taken in generation.take(response):
                got[index] += taken.token_ids
                texts[index] += taken.text
                logprobs += taken.logprobs
                assert taken.index not in told
                told += [taken.index] * (taken.finish_reason is not None)
        if not generation.done:
            generation.failed(LOST_ERROR)
    assert (got, texts, sorted(told)) == (tokens, whole, [0, 1, 2])
    assert sorted(p.chosen.token_id for p in logprobs) == sorted(token for of in tokens.values() for token in of)
    assert {i: (list(e.token_ids), e.text) for i, e in generation.completions.items()} == {
        i: (tokens[i], whole[i]) for i in tokens
    }


def _logprobs(token: int) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(chosen=types_pb2.TokenLogprob(token_id=token, logprob=-1.0))


def test_log_probabilities_that_came_in_chunks_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop waits while those of a message are read, and the end has all of them once more."""
    made = Counter[type]()
    readers = wire._readers

    def counted(cls: type, descriptor: Any) -> Any:
        made[cls] += 1
        return readers(cls, descriptor)

    monkeypatch.setattr(wire, "_readers", counted)
    tokens = list(range(1, 41))
    generation = ResumableGeneration("x", 1, {"logprobs": 0}, CallSettings(resume_timeout=30))
    for token in tokens:
        response = chunk(token, done=token - 1)
        response.chunk.logprobs.append(_logprobs(token))
        generation.take(response)
    end = complete(*tokens)
    end.complete.logprobs.extend(map(_logprobs, tokens))
    generation.take(end)
    assert made[PositionLogprobs] == made[TokenLogprob] == len(tokens)
    assert [each.chosen.token_id for each in generation.completions[0].logprobs] == tokens


@pytest.mark.parametrize("message", [chunk(4, index=1), complete(4, index=1)])
def test_a_sequence_that_nobody_asked_for_is_an_error(message: pb.GenerateResponse) -> None:
    generation = ResumableGeneration("x", 1, {}, CallSettings())
    with pytest.raises(ServerError, match="the server sent sequence 1 of 1"):
        generation.take(message)
