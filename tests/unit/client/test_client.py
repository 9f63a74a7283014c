"""Both clients against a scripted server: requests as sent, results as typed, errors as domain exceptions."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import numpy
import pytest
from support.clients.scripted_server import Hangs, ScriptedServer, answer, chunk, complete

from pagekv.client import (
    CacheControls,
    ChatMessage,
    DeadlineExceeded,
    InvalidRequest,
    MediaHash,
    PageKVClient,
)
from pagekv.v1 import inference_service_pb2 as pb
from pagekv.v1 import operator_service_pb2 as operator_pb
from pagekv.v1 import types_pb2


def test_generate_sends_every_option_and_types_the_answer(server: ScriptedServer, client: PageKVClient) -> None:
    def check(request: pb.GenerateRequest) -> None:
        sampling = request.sampling_params
        assert request.prompt.text == "hello"
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 4)
        assert (sampling.min_p, sampling.max_tokens, sampling.min_tokens) == (0.25, 9, 2)
        assert (sampling.seed, sampling.n) == (11, 1)
        assert list(sampling.stop) == ["end"]
        assert list(sampling.stop_token_ids) == [5, 6]
        assert sampling.ignore_eos
        assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (2, 0.5, -0.5)
        assert sampling.logprobs == 1
        assert dict(sampling.logit_bias) == {3: 1.5}
        assert (request.priority, request.request_id) == (-4, "mine")
        assert (request.cache.namespace, request.adapter) == ("n", "a")
        assert request.cache.HasField("read")
        assert not request.cache.read
        assert not request.cache.HasField("write"), "True is the server's default"
        (media,) = request.cache.media_hashes
        assert (media.position, media.length, media.hash) == (1, 2, "h")

    chosen = types_pb2.TokenLogprob(token_id=7, logprob=-0.5)
    logprobs = [types_pb2.PositionLogprobs(chosen=chosen, top=[chosen])]
    first = chunk(7, text="seven", cached=2)
    first.chunk.logprobs.extend(logprobs)
    server.expect(
        "Generate",
        first,
        complete(
            7,
            text="seven",
            cached=2,
            reason=types_pb2.FINISH_REASON_STOP,
            stop_string="end",
            preemptions=3,
            logprobs=logprobs,
        ),
        check=check,
    )
    result = client.generate(
        "hello",
        temperature=0.5,
        top_p=0.75,
        top_k=4,
        min_p=0.25,
        max_tokens=9,
        min_tokens=2,
        seed=11,
        stop="end",
        stop_token_ids=[5, 6],
        ignore_eos=True,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logprobs=1,
        logit_bias={3: 1.5},
        priority=-4,
        request_id="mine",
        adapter="a",
        cache=CacheControls("n", (MediaHash(1, 2, "h"),), read=False),
    )
    assert (result.text, result.token_ids, result.finish_reason) == ("seven", (7,), "stop")
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (3, 1, 2)
    assert (result.stop_string, result.stop_token_id, result.preemptions, result.resumes) == ("end", None, 3, 0)
    assert result.logprobs[0].chosen.token_id == 7
    assert result.logprobs[0].top[0].logprob == -0.5


def test_what_is_not_given_is_not_sent_but_the_seed_and_request_id(
    server: ScriptedServer, client: PageKVClient
) -> None:
    sent: list[pb.GenerateRequest] = []
    for _ in range(2):
        server.expect("Generate", *answer(7), check=sent.append)
        client.generate([1, 2, 3])
    assert [list(request.prompt.token_ids.ids) for request in sent] == [[1, 2, 3], [1, 2, 3]]
    present = [field.name for field, _ in sent[0].sampling_params.ListFields()]
    assert present == ["n", "seed"]
    assert sent[0].sampling_params.seed != sent[1].sampling_params.seed
    assert sent[0].request_id != sent[1].request_id


@pytest.mark.parametrize(
    "messages",
    [
        [ChatMessage("user", "hi"), ChatMessage("assistant", "")],
        [{"role": "user", "content": "hi"}, {"content": "", "role": "assistant"}],
    ],
)
def test_a_conversation_is_sent_as_chat(server: ScriptedServer, client: PageKVClient, messages: Any) -> None:
    def check(request: pb.GenerateRequest) -> None:
        assert [(m.role, m.content) for m in request.prompt.chat.messages] == [("user", "hi"), ("assistant", "")]

    server.expect("Generate", *answer(7), check=check)
    client.generate(messages)


def test_generate_is_for_one_sequence(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", *answer(7))
    assert client.generate("x", n=1).token_ids == (7,)
    with pytest.raises(InvalidRequest, match="generate_n several") as caught:
        client.generate("x", n=2)
    assert caught.value.field == "n"


@pytest.mark.parametrize("n", [3, numpy.int64(3)])
def test_several_sequences_come_back_by_index(server: ScriptedServer, client: PageKVClient, n: Any) -> None:
    def check(request: pb.GenerateRequest) -> None:
        assert request.sampling_params.n == 3
        assert request.only_complete

    server.expect("Generate", complete(9, index=2), complete(7, index=0), complete(8, index=1), check=check)
    assert [c.token_ids for c in client.generate_n("x", n=n)] == [(7,), (8,), (9,)]


def test_beam_search_comes_back_best_first(server: ScriptedServer, client: PageKVClient) -> None:
    def check(request: pb.GenerateRequest) -> None:
        sampling = request.sampling_params
        assert (sampling.n, sampling.beam_width, sampling.length_penalty, sampling.early_stopping) == (2, 4, 0.5, True)
        assert not sampling.HasField("seed"), "beam search draws nothing"

    best = complete(7, 9, reason=types_pb2.FINISH_REASON_STOP, stop_token_id=9, cumulative_logprob=-1.25)
    replies = [best, complete(8, 8, index=1, cumulative_logprob=-2.5)]
    server.expect("Generate", *replies, check=check)
    results = client.generate_n("x", 2, beam_width=4, length_penalty=0.5, early_stopping=True)
    assert [(result.token_ids, result.cumulative_logprob) for result in results] == [((7, 9), -1.25), ((8, 8), -2.5)]
    server.expect("Generate", *replies, check=check)
    stream = client.stream("x", n=2, beam_width=4, length_penalty=0.5, early_stopping=True)
    assert [(c.index, c.token_ids, c.text, c.finish_reason) for c in stream] == [
        (0, (7, 9), "t7 t9 ", "stop"),
        (1, (8, 8), "t8 t8 ", "length"),
    ]
    assert [stream.completions[index].cumulative_logprob for index in range(2)] == [-1.25, -2.5]


def test_sampling_has_no_cumulative_logprob(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", *answer(7))
    assert client.generate("x").cumulative_logprob is None


def test_a_stream_yields_chunks_then_has_the_completion(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4, 5, cached=2), chunk(6, done=2, cached=2), complete(4, 5, 6, cached=2))
    stream = client.stream("x", request_id="abc")
    assert stream.request_id == "abc"
    with pytest.raises(RuntimeError, match="not ended"):
        _ = stream.completion
    assert [(c.token_ids, c.text, c.completion_tokens, c.finish_reason) for c in stream] == [
        ((4, 5), "t4 t5 ", 2, None),
        ((6,), "t6 ", 3, None),
        ((), "", 3, "length"),
    ]
    assert stream.completion.text == "t4 t5 t6 "
    assert stream.completions == {0: stream.completion}


def test_every_sequence_says_by_itself_why_it_ended(server: ScriptedServer, client: PageKVClient) -> None:
    """In its last chunk, which nothing is left for: every token came before."""
    stop, abort = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_ABORT
    server.expect(
        "Generate",
        chunk(4, index=1),
        chunk(8, 9, index=2, cached=2),
        complete(8, 9, index=2, cached=2),
        chunk(5, index=0),
        complete(4, index=1, reason=stop),
        complete(5, index=0, reason=abort),
    )
    stream, seen = client.stream("x", n=3), []
    for each in stream:
        seen.append((each.index, each.token_ids, each.text, each.cached_tokens, each.finish_reason))
        assert (each.finish_reason is None) == (each.index not in stream.completions)
    assert seen == [
        (1, (4,), "t4 ", 0, None),
        (2, (8, 9), "t8 t9 ", 2, None),
        (2, (), "", 2, "length"),
        (0, (5,), "t5 ", 0, None),
        (1, (), "", 0, "stop"),
        (0, (), "", 0, "abort"),
    ]


@pytest.mark.parametrize("way", ["close", "with"])
def test_closing_a_stream_aborts_the_request(server: ScriptedServer, client: PageKVClient, way: str) -> None:
    server.expect("Generate", chunk(4), Hangs())
    stream = client.stream("x")
    if way == "with":
        with stream:
            assert next(stream).token_ids == (4,)
    else:
        assert next(stream).token_ids == (4,)
        stream.close()
    server.wait_cancelled("Generate")
    assert list(stream) == []


def test_a_calls_own_time_limit_wins_and_a_generation_has_none_by_default(
    server: ScriptedServer, make_client: Any
) -> None:
    server.expect("GetStats", operator_pb.GetStatsResponse())
    make_client(server.target, timeout=1000).stats()
    server.expect("Generate", *answer(4))
    make_client(server.target, timeout=1000).generate("x", timeout=3000)
    server.expect("Generate", *answer(4))
    make_client(server.target, timeout=0.5).generate("x")
    unary, limited, unlimited = server.deadlines
    assert unary is not None
    assert limited is not None
    assert unary < 1100
    assert 2000 < limited < 3300
    # The wire has few digits for large ones. Without a timeout gRPC reports one of centuries.
    assert unlimited is None or unlimited > 1e6


def test_a_server_that_does_not_answer_in_time(make_client: Any) -> None:
    # The system accepts the connection, and nothing ever reads from it.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = make_client(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.5)
        with pytest.raises(DeadlineExceeded, match="timeout="):
            client.stats()
        with pytest.raises(DeadlineExceeded):
            client.generate("x", timeout=0.7)


def test_a_stream_that_began_in_an_event_loop_is_read_on_after_it(server: ScriptedServer) -> None:
    """An event loop that ends closes the generators that it knows: such a stream looked complete."""
    server.expect("Generate", chunk(4), chunk(5, done=1), complete(4, 5))
    server.expect(
        "ListBlocks", operator_pb.ListBlocksResponse(blocks=[operator_pb.BlockInfo(), operator_pb.BlockInfo()])
    )

    async def begin(client: PageKVClient) -> Any:
        stream, blocks = client.stream("x"), client.iter_blocks()
        assert next(stream).token_ids == (4,)
        next(blocks)
        hooks = sys.get_asyncgen_hooks()
        assert hooks.firstiter is not None, "those of the loop are left as they were"
        return stream, blocks

    with PageKVClient(server.target) as client:
        stream, blocks = asyncio.run(begin(client))
        assert [each.token_ids for each in stream] == [(5,), ()]
        assert stream.completion.token_ids == (4, 5)
        assert len(list(blocks)) == 1
