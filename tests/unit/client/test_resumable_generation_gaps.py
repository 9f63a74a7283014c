"""Answers whose messages do not make one whole: an error, never a shorter answer."""

from __future__ import annotations

from typing import Any

import pytest
from support.clients.scripted_server import LOST, Fails, ScriptedServer, chunk, complete

from pagekv.client import DataLoss, PageKVClient, ServerError
from pagekv.client.generation_types import GenerateOptions
from pagekv.v1 import types_pb2

ABORTED = types_pb2.FINISH_REASON_ABORT


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        # A message in the middle is missing, the first one, one comes twice, or its last token is cut off.
        ([chunk(4), chunk(6, done=2)], "sequence 0 has 3 tokens by the server's count, 2 came"),
        ([chunk(5, done=1)], "has 2 tokens by the server's count, 1 came"),
        ([chunk(4), chunk(4)], "has 1 tokens by the server's count, 2 came"),
        ([chunk(4), chunk(text="t5 ", done=2)], "has 2 tokens by the server's count, 1 came"),
        # The last one is missing, or the end is cut off or counts what is not there.
        ([chunk(4), complete(4, 5)], "ends with 2 tokens, 1 came with its chunks"),
        ([complete(4)], "ends with 1 tokens, 0 came with its chunks"),
        ([chunk(4, 5), complete(4)], "ends with 1 tokens, 2 came with its chunks"),
        ([chunk(4, 5), complete(4, reason=ABORTED)], "ends with 1 tokens, 2 came with its chunks"),
        ([chunk(4, 5), complete(4, 5, resumed=1)], "has 3 tokens by the server's count, 2 came"),
        ([chunk(4), complete(4, text="t4 and more")], "ends with another text than came with its chunks"),
        ([chunk(4, text=""), complete(4)], "ends with another text than came with its chunks"),
    ],
)
@pytest.mark.parametrize("call", ["stream", "generate"])
def test_a_gap_within_a_connection(
    server: ScriptedServer, client: PageKVClient, call: str, replies: list[Any], words: str
) -> None:
    server.expect("Generate", *replies)
    with pytest.raises(DataLoss, match=words) as caught:
        client.generate("x") if call == "generate" else list(client.stream("x"))
    assert isinstance(caught.value, ServerError)
    assert caught.value.code == "DATA_LOSS"


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ([chunk(6, done=2)], "has 3 tokens by the server's count, 2 came"),
        ([chunk(5)], "has 1 tokens by the server's count, 2 came"),
        ([complete(text="", resumed=2)], "has 2 tokens by the server's count, 1 came"),
        ([chunk(5, done=1), complete(resumed=1, text="")], "ends with 1 tokens, 2 came with its chunks"),
        ([chunk(5, done=1), complete(5, 6, resumed=1)], "ends with 3 tokens, 2 came with its chunks"),
    ],
)
def test_a_gap_behind_a_break(server: ScriptedServer, client: PageKVClient, replies: list[Any], words: str) -> None:
    server.expect("Generate", chunk(4), Fails(LOST))
    server.expect("Generate", *replies)
    with pytest.raises(DataLoss, match=words):
        client.generate("x")


def test_a_gap_in_a_replay(server: ScriptedServer, client: PageKVClient) -> None:
    """Of several sequences, each of which begins again."""
    server.expect("Generate", chunk(4, 5, index=1), Fails(LOST))
    server.expect("Generate", chunk(4, index=1), complete(4, index=1))
    with pytest.raises(DataLoss, match="sequence 1 ends with 1 tokens, 2 came before"):
        list(client.stream("x", n=2))
    server.expect("Generate", chunk(4, 5, index=1), Fails(LOST))
    server.expect("Generate", chunk(5, index=1, done=1))
    with pytest.raises(DataLoss, match="sequence 1 has 2 tokens by the server's count, 1 came"):
        list(client.stream("x", n=2))


def test_answers_that_are_not_streamed_are_counted_too(server: ScriptedServer, client: PageKVClient) -> None:
    one: GenerateOptions = {"resume_timeout": 0}
    searches: list[GenerateOptions] = [one, {"beam_width": 2}]
    for options in searches:
        server.expect("Generate", complete(4, resumed=1))
        with pytest.raises(DataLoss, match="has 2 tokens by the server's count, 1 came"):
            client.generate("x", **options)
    server.expect("Generate", complete(5, 6, index=0), Fails(LOST))
    server.expect("Generate", complete(5, index=0))
    with pytest.raises(DataLoss, match="sequence 0 ends with 1 tokens, 2 came before"):
        client.generate_n("x", 2, beam_width=2)


def test_each_token_has_the_log_probabilities_asked_for(server: ScriptedServer, client: PageKVClient) -> None:
    server.expect("Generate", chunk(4))
    with pytest.raises(DataLoss, match="has 0 log-probabilities for 1 tokens"):
        client.generate("x", logprobs=0)


def test_an_abort_in_the_middle_of_a_replay_takes_nothing_back(server: ScriptedServer, client: PageKVClient) -> None:
    """The caller has the tokens that came before, and the completion has them too."""
    server.expect("Generate", chunk(4, 5, 6, index=0), Fails(LOST))
    ends = [chunk(4, index=0), complete(4, index=0, reason=ABORTED), complete(index=1, text="", reason=ABORTED)]
    server.expect("Generate", *ends)
    stream = client.stream("x", n=2)
    assert [(c.index, c.token_ids) for c in stream] == [(0, (4, 5, 6)), (0, ()), (1, ())]
    end = stream.completions[0]
    assert (end.token_ids, end.text, end.completion_tokens) == ((4, 5, 6), "t4 t5 t6 ", 3)
    assert end.finish_reason == "abort"
